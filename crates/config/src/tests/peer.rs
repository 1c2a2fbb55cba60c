//! What a DeepSpeed file leaves out is as DeepSpeed has it: defaults of version 0.19.2, and of all before it.

use super::*;

/// From 0.19.3 on DeepSpeed clips at 1 where a file says nothing.
#[test]
fn a_file_without_clipping_does_not_clip() {
    let clip = |json: &str| plain(file("ds.json", json)).clip;
    assert_eq!(clip("{}"), None);
    assert_eq!(clip(r#"{"optimizer": {"type": "AdamW"}, "gradient_clipping": null}"#), None);
    assert_eq!(clip(r#"{"gradient_clipping": 0.5}"#), Some(0.5));
    assert_eq!(clip(r#"{"gradient_clipping": "auto"}"#), Some(1.0), "ours");
    let flag = Raw { clip: Some(2.0), ..file("ds.json", "{}") };
    assert_eq!(plain(flag).clip, Some(2.0));
    let facts = Facts::synthetic(&Raw::default()).unwrap();
    let explained = file("ds.json", "{}").explain(&facts, 1);
    let note = explained.settings.iter().find(|note| note.name == "clip").unwrap();
    let origin = Origin::Default("DeepSpeed's default, as gradient_clipping is not given".to_string());
    assert_eq!((note.value.as_str(), &note.origin), ("0", &origin));
}

/// FusedAdam's and DeepSpeedCPUAdam's weight_decay is 0, that of torch.optim.AdamW 0.01.
#[test]
fn weight_decay_that_is_left_out_is_that_of_the_optimizer_meant() {
    let decay = |params: &str| {
        let json = format!(r#"{{"optimizer": {{"type": "AdamW", "params": {{{params}}}}}}}"#);
        plain(file("ds.json", &json)).optimizer.weight_decay()
    };
    assert_eq!(decay(""), 0.0);
    assert_eq!(decay(r#""torch_adam": false"#), 0.0);
    assert_eq!(decay(r#""torch_adam": true"#), 0.01);
    assert_eq!(decay(r#""torch_adam": true, "weight_decay": 0.3"#), 0.3);
    assert_eq!(decay(r#""weight_decay": "auto""#), 0.05, "ours");
}

/// DeepSpeed warms up through a run that is shorter, and divides by zero in one that is longer.
#[test]
fn a_cosine_that_ends_with_its_warm_up_is_refused_where_it_comes_to_that() {
    let cosine = |total: &str, warmup: u64, steps| {
        let params = format!(r#""total_num_steps": {total}, "warmup_num_steps": {warmup}"#);
        let json = format!(r#"{{"scheduler": {{"type": "WarmupCosineLR", "params": {{{params}}}}}}}"#);
        resolve(Raw { steps: Some(steps), ..file("ds.json", &json) }, 1)
    };
    assert_eq!(
        cosine("10", 10, 12).unwrap_err(),
        "ds.json: scheduler.params.total_num_steps and warmup_num_steps are both 10, where WarmupCosineLR divides by \
         zero, and the run has 12 steps"
    );
    assert!(cosine("10", 10, 11).is_ok() && cosine("\"auto\"", 10, 10).is_ok());
    let longer = cosine("20", 6, 40).unwrap().schedule;
    assert!(
        longer.at(20) < longer.at(24) && longer.at(24) < longer.at(30),
        "past its end the cosine rises again"
    );
}
