fn main() {
    for path in std::env::args().skip(1) {
        let text = std::fs::read_to_string(&path).unwrap();
        let mut sections: Vec<String> = vec![];
        for line in text.lines() {
            if line.starts_with("plan ") { sections.push(String::new()); }
            if let Some(s) = sections.last_mut() { s.push_str(line); s.push('\n'); }
        }
        let mut printed: Vec<String> = vec![];
        for s in &sections {
            let plan: graph::Plan = match s.parse() { Ok(p) => p, Err(e) => { println!("{path}: {e}"); return; } };
            if let Err(e) = plan.check() { println!("{path} {}: {e}", plan.name); }
            printed.extend(plan.to_string().lines().map(String::from));
        }
        let mut out = String::new();
        let mut it = printed.into_iter();
        for line in text.lines() {
            if line.is_empty() || line.starts_with('#') { out.push_str(line); } else { out.push_str(&it.next().unwrap()); }
            out.push('\n');
        }
        assert!(it.next().is_none());
        std::fs::write(&path, out).unwrap();
    }
}
