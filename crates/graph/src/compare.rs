//! Comparison of two plans: the steps that only one of them has.

use crate::plan::{Plan, PlanValue, Step};
use std::fmt;

/// A step of one plan or of both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// In both, without its place in memory.
    Same(String),
    /// In the first alone.
    Gone(String),
    /// In the second alone.
    New(String),
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Change::Same(step) => write!(f, "  {step}"),
            Change::Gone(step) => write!(f, "- {step}"),
            Change::New(step) => write!(f, "+ {step}"),
        }
    }
}

impl Plan {
    /// What a step does, without places, waits and attributes: equal for steps that do the same.
    fn summary(&self, step: &Step) -> String {
        let types = |values: &[usize]| -> Vec<String> {
            let mut texts: Vec<(String, usize)> = vec![];
            for value in values {
                let PlanValue { ty, .. } = &self.values[*value];
                match texts.last_mut() {
                    Some((text, times)) if *text == ty.to_string() => *times += 1,
                    _ => texts.push((ty.to_string(), 1)),
                }
            }
            let text = |(text, times): (String, usize)| match times {
                1 => text,
                _ => format!("{times} × {text}"),
            };
            texts.into_iter().map(text).collect()
        };
        let (inputs, outputs) = (short(types(&step.inputs)), short(types(&step.outputs)));
        let arrow = if outputs.is_empty() { String::new() } else { format!(" → {outputs}") };
        let left = if step.left { ", left under way" } else { "" };
        let (lane, op) = (step.lane.name(), step.op.name());
        format!("{lane} {op}({inputs}){arrow} ; {} {}{left}", step.phase.name(), step.layer)
    }
}

/// Of a long list, the ends.
fn short(list: Vec<String>) -> String {
    match &list[..] {
        [first, .., last] if list.len() > 3 => format!("{first}, … {} more …, {last}", list.len() - 2),
        _ => list.join(", "),
    }
}

/// The steps of both plans, in order: of those that are in both, as many as can be.
pub fn compare(before: &Plan, after: &Plan) -> Vec<Change> {
    let list = |plan: &Plan| plan.steps.iter().map(|step| plan.summary(step)).collect::<Vec<_>>();
    let (before, after) = (list(before), list(after));
    let alike = |pair: &(&String, &String)| pair.0 == pair.1;
    let start = before.iter().zip(&after).take_while(alike).count();
    let rest = before.len().min(after.len()) - start;
    let end = before.iter().rev().zip(after.iter().rev()).take(rest).take_while(alike).count();
    let same = |steps: &[String]| steps.iter().cloned().map(Change::Same).collect::<Vec<_>>();
    let mut changes = same(&before[..start]);
    changes.extend(middle(&before[start..before.len() - end], &after[start..after.len() - end]));
    changes.extend(same(&before[before.len() - end..]));
    changes
}

/// By the longest common subsequence.
fn middle(before: &[String], after: &[String]) -> Vec<Change> {
    let width = after.len() + 1;
    // Length of what the rests have in common.
    let mut common = vec![0u32; (before.len() + 1) * width];
    for one in (0..before.len()).rev() {
        for other in (0..after.len()).rev() {
            common[one * width + other] = if before[one] == after[other] {
                common[(one + 1) * width + other + 1] + 1
            } else {
                common[(one + 1) * width + other].max(common[one * width + other + 1])
            };
        }
    }
    let (mut one, mut other, mut changes) = (0, 0, vec![]);
    while one < before.len() || other < after.len() {
        let (gone, new) = (before.get(one), after.get(other));
        let keeps = |one: usize, other: usize| common.get(one * width + other).copied().unwrap_or(0);
        match (gone, new) {
            (Some(gone), Some(new)) if gone == new => {
                changes.push(Change::Same(gone.clone()));
                (one, other) = (one + 1, other + 1);
            }
            (Some(gone), new) if new.is_none() || keeps(one + 1, other) >= keeps(one, other + 1) => {
                changes.push(Change::Gone(gone.clone()));
                one += 1;
            }
            (_, Some(new)) => {
                changes.push(Change::New(new.clone()));
                other += 1;
            }
            (_, None) => break,
        }
    }
    changes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_of_one_plan_alone_are_named() {
        let list = |text: &str| text.chars().map(String::from).collect::<Vec<_>>();
        let text = |before: &str, after: &str| {
            let changes = middle(&list(before), &list(after));
            changes.iter().map(|change| change.to_string().replace(' ', "")).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(text("abcd", "abxd"), "a b -c +x d");
        assert_eq!(text("", "ab"), "+a +b");
        assert_eq!(text("ab", ""), "-a -b");
        assert_eq!(text("abc", "bcd"), "-a b c +d");
    }
}
