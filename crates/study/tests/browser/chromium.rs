//! A headless Chromium, driven over the pipe of its DevTools protocol.

use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Every answer comes within this.
const PATIENCE: Duration = Duration::from_secs(60);

pub struct Chromium {
    child: Child,
    to: Option<ChildStdin>,
    from: Receiver<Value>,
    sent: u64,
    events: Vec<Value>,
    folder: PathBuf,
}

impl Chromium {
    /// `folder` becomes its own, and goes with it.
    pub fn start(program: &Path, folder: PathBuf) -> Chromium {
        std::fs::create_dir_all(&folder).unwrap();
        // The protocol speaks over descriptors 3 and 4; a shell makes them of our pipes.
        let mut child = Command::new("sh")
            .args(["-c", "exec \"$0\" \"$@\" 3<&0 4>&1 0</dev/null 1>/dev/null 2>/dev/null"])
            .arg(program)
            .args([
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
            ])
            .args(["--disable-background-networking", "--disable-component-update", "--hide-scrollbars"])
            .arg(format!("--user-data-dir={}", folder.display()))
            .arg("--remote-debugging-pipe")
            .arg("about:blank")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let to = child.stdin.take();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let (sender, from) = channel();
        std::thread::spawn(move || {
            let mut message = vec![];
            while out.read_until(0, &mut message).is_ok_and(|n| n > 0) {
                let text = message.strip_suffix(&[0]).unwrap_or(&message);
                if sender.send(serde_json::from_slice(text).unwrap()).is_err() {
                    break;
                }
                message.clear();
            }
        });
        Chromium { child, to, from, sent: 0, events: vec![], folder }
    }

    fn call(&mut self, session: Option<&str>, method: &str, params: Value) -> Value {
        self.sent += 1;
        let mut message = json!({ "id": self.sent, "method": method, "params": params });
        if let Some(session) = session {
            message["sessionId"] = session.into();
        }
        let to = self.to.as_mut().unwrap();
        to.write_all(format!("{message}\0").as_bytes()).unwrap();
        let deadline = Instant::now() + PATIENCE;
        loop {
            let message = self.next(deadline, method);
            if message["id"] == self.sent {
                assert!(message.get("error").is_none(), "{method}: {message}");
                return message["result"].clone();
            }
            self.events.push(message);
        }
    }

    fn next(&mut self, deadline: Instant, what: &str) -> Value {
        let left = deadline.saturating_duration_since(Instant::now());
        self.from.recv_timeout(left).unwrap_or_else(|_| panic!("{what}: the browser does not answer"))
    }

    pub fn allow_downloads(&mut self, folder: &Path) {
        let params = json!({ "behavior": "allow", "downloadPath": folder, "eventsEnabled": true });
        self.call(None, "Browser.setDownloadBehavior", params);
    }

    /// A page of a size, in "light" or "dark".
    pub fn open(&mut self, url: &str, (width, height): (u32, u32), scheme: &str) -> Page<'_> {
        let target = self.call(None, "Target.createTarget", json!({ "url": "about:blank" }));
        let params = json!({ "targetId": target["targetId"], "flatten": true });
        let session =
            self.call(None, "Target.attachToTarget", params)["sessionId"].as_str().unwrap().to_string();
        self.events.clear();
        let mut page = Page { browser: self, session, target: target["targetId"].clone() };
        for domain in ["Page", "Runtime", "Network", "Log"] {
            page.call(&format!("{domain}.enable"), json!({}));
        }
        page.call("Emulation.setFocusEmulationEnabled", json!({ "enabled": true }));
        page.call("Page.bringToFront", json!({}));
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600 });
        page.call("Emulation.setDeviceMetricsOverride", size);
        let features = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        page.call("Emulation.setEmulatedMedia", features);
        page.call("Page.navigate", json!({ "url": url }));
        page.wait_for("Page.loadEventFired");
        page.run("document.fonts.ready.then(() => true)");
        page
    }
}

impl Drop for Chromium {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        self.to = None;
        // Its helpers end a moment later and may still write.
        for _ in 0..20 {
            if std::fs::remove_dir_all(&self.folder).is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

pub struct Page<'a> {
    browser: &'a mut Chromium,
    session: String,
    target: Value,
}

impl Page<'_> {
    pub fn call(&mut self, method: &str, params: Value) -> Value {
        let session = self.session.clone();
        self.browser.call(Some(&session), method, params)
    }

    fn wait_for(&mut self, event: &str) {
        let deadline = Instant::now() + PATIENCE;
        while !self.browser.events.iter().any(|e| e["method"] == event && e["sessionId"] == *self.session) {
            let message = self.browser.next(deadline, event);
            self.browser.events.push(message);
        }
    }

    /// What a script comes to; promises are waited for.
    pub fn run(&mut self, script: &str) -> Value {
        let params = json!({ "expression": script, "awaitPromise": true, "returnByValue": true });
        let result = self.call("Runtime.evaluate", params);
        assert!(result.get("exceptionDetails").is_none(), "{script}: {result}");
        result["result"]["value"].clone()
    }

    pub fn point_at(&mut self, x: f64, y: f64) {
        self.call("Input.dispatchMouseEvent", json!({ "type": "mouseMoved", "x": x, "y": y }));
    }

    /// Clicks what a selector finds, as a person would.
    pub fn click(&mut self, selector: &str) {
        let at = self.run(&format!(
            "(() => {{ const it = document.querySelector({selector:?}); it.scrollIntoView({{ block: 'center' }}); \
             const box = it.getBoundingClientRect(); return [box.left + box.width / 2, box.top + box.height / 2]; }})()"
        ));
        for kind in ["mousePressed", "mouseReleased"] {
            let params = json!({ "type": kind, "x": at[0], "y": at[1], "button": "left", "clickCount": 1 });
            self.call("Input.dispatchMouseEvent", params);
        }
    }

    /// Follows the link that a selector finds, and waits for what is behind it.
    pub fn go(&mut self, selector: &str) {
        let url = self.run(&format!("document.querySelector({selector:?}).href"));
        self.browser.events.retain(|event| event["method"] != "Page.loadEventFired");
        self.call("Page.navigate", json!({ "url": url }));
        self.wait_for("Page.loadEventFired");
    }

    pub fn tap(&mut self, x: f64, y: f64) {
        let touch = |kind: &str, points: Value| json!({ "type": kind, "touchPoints": points });
        self.call("Input.dispatchTouchEvent", touch("touchStart", json!([{ "x": x, "y": y }])));
        self.call("Input.dispatchTouchEvent", touch("touchEnd", json!([])));
    }

    pub fn press(&mut self, key: &str) {
        for kind in ["keyDown", "keyUp"] {
            self.call("Input.dispatchKeyEvent", json!({ "type": kind, "key": key, "code": key }));
        }
    }

    pub fn screenshot(&mut self, clip: Option<Value>) -> String {
        let mut params = json!({ "format": "png", "captureBeyondViewport": true });
        if let Some(clip) = clip {
            params["clip"] = clip;
        }
        self.call("Page.captureScreenshot", params)["data"].as_str().unwrap().to_string()
    }

    /// Errors and warnings of the console, exceptions, and addresses that were asked for.
    pub fn complaints_and_requests(&mut self) -> (Vec<String>, Vec<String>) {
        // What was sent before this answer has arrived.
        self.run("0");
        let (mut complaints, mut requests) = (vec![], vec![]);
        for event in &self.browser.events {
            match event["method"].as_str().unwrap_or_default() {
                "Runtime.exceptionThrown" => complaints.push(event["params"].to_string()),
                "Runtime.consoleAPICalled" => complaints.push(event["params"].to_string()),
                "Log.entryAdded" => complaints.push(event["params"]["entry"].to_string()),
                "Network.requestWillBeSent" => {
                    requests.push(event["params"]["request"]["url"].as_str().unwrap_or_default().to_string());
                }
                _ => {}
            }
        }
        (complaints, requests)
    }

    pub fn close(self) {
        let target = self.target.clone();
        self.browser.call(None, "Target.closeTarget", json!({ "targetId": target }));
    }
}
