//! Scores of a classifier, for people and as JSON.

use super::subject::Subject;
use crate::class_names::{class_name, exact_name};
use crate::table::count;
use serde_json::{Value, json};
use text::many;
use train::confusion::{ClassScore, Confusion};
use train::session::Score;

/// Classes are listed one by one up to this many; of more, the worst.
const LISTED: usize = 20;
const WORST: usize = 10;
const MISTAKES: usize = 5;

pub fn in_a_line(score: &Score) -> String {
    format!(
        "{} · loss {:.4} · top-1 {:.2}% · top-5 {:.2}%",
        many(score.samples.round() as usize, "image"),
        score.loss,
        100.0 * score.top1,
        100.0 * score.top5
    )
}

pub fn print(score: &Score, confusion: &Confusion, names: &[String]) {
    println!("{}", in_a_line(score));
    let mut classes: Vec<(usize, ClassScore)> = confusion.by_class().into_iter().enumerate().collect();
    classes.retain(|(_, score)| score.f1.is_some());
    if classes.len() > LISTED {
        let (f1, all) = (|score: &ClassScore| score.f1.unwrap_or(0.0), classes.len());
        classes.sort_by(|a, b| f1(&a.1).total_cmp(&f1(&b.1)));
        classes.truncate(WORST);
        println!("\nthe {WORST} classes of {all} with the lowest F1");
    } else {
        println!();
    }
    let average = "macro average";
    let names_of = classes.iter().map(|(class, _)| class_name(names, *class).chars().count());
    let width = names_of.max().unwrap_or(0).max(average.len());
    println!("  {:<width$}  {:>7}  {:>7}  {:>9}  {:>7}", "class", "images", "recall", "precision", "F1");
    let line = |name: &str, images: String, [recall, precision, f1]: [Option<f64>; 3]| {
        let [recall, precision, f1] = [recall, precision, f1].map(percent);
        println!("  {name:<width$}  {images:>7}  {recall:>7}  {precision:>9}  {f1:>7}");
    };
    for (class, ClassScore { images, recall, precision, f1 }) in classes {
        line(&class_name(names, class), count(images as usize), [recall, precision, f1]);
    }
    let averages = confusion.averages();
    line(average, String::new(), [averages.recall, averages.precision, averages.f1]);
    let mistakes = confusion.mistakes();
    if !mistakes.is_empty() {
        println!("most frequent mistakes");
    }
    for (label, taken, images) in mistakes.into_iter().take(MISTAKES) {
        println!("  {images:>5} × {} taken for {}", class_name(names, label), class_name(names, taken));
    }
}

/// A share; a dash where it is not defined.
fn percent(share: Option<f64>) -> String {
    share.map_or("–".to_string(), |share| format!("{:.1}%", 100.0 * share))
}

pub fn to_json(subject: &Subject, score: &Score, confusion: &Confusion, names: &[String]) -> Value {
    let class = |(class, score): (usize, ClassScore)| {
        let mut report = json!(score);
        report["class"] = json!(exact_name(names, class));
        report
    };
    let mut report = subject.to_json();
    report["eval_loss"] = json!(score.loss);
    report["eval_top1"] = json!(score.top1);
    report["eval_top5"] = json!(score.top5);
    report["samples"] = json!(score.samples.round() as u64);
    report["macro"] = json!(confusion.averages());
    report["classes"] = confusion.by_class().into_iter().enumerate().map(class).collect();
    report["confusion"] = confusion.rows().map(|row| json!(row)).collect();
    report
}
