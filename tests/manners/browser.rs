//! Chromium driven over its DevTools protocol, through pipes.
//!
//! Source: Chromium's `--remote-debugging-pipe` (messages are JSON, each ended by a zero byte, on descriptors 3 and 4).

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// For whatever the browser or the page is asked; a machine may be busy.
const PATIENCE: Duration = Duration::from_secs(120);

pub fn chromium() -> Option<PathBuf> {
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .flat_map(|dir| names.map(|name| dir.join(name)))
        .find(|file| file.is_file())
}

/// A browser with one page.
pub struct Page {
    child: Child,
    to: File,
    from: Receiver<Value>,
    next: u64,
    session: Value,
    /// Exceptions that nothing on the page caught.
    pub failures: Vec<String>,
    _profile: tempfile::TempDir,
}

impl Page {
    /// Opens an address in a browser of its own; `None`: there is no browser.
    pub fn open(url: &str) -> Option<Page> {
        let browser = chromium()?;
        let profile = tempfile::tempdir().expect("a temporary directory");
        let pipes = ["to", "from"].map(|name| profile.path().join(name));
        let made = Command::new("mkfifo").args(&pipes).status().expect("mkfifo runs");
        assert!(made.success(), "pipes are made");
        // Opened both ways, so that nobody waits for the other end.
        let [to, from] = pipes
            .each_ref()
            .map(|p| File::options().read(true).write(true).open(p).expect("a pipe"));
        let child = Command::new("sh")
            .args(["-c", "to=$1 from=$2; shift 2; exec \"$@\" 3<\"$to\" 4>\"$from\"", "sh"])
            .args(&pipes)
            .arg(&browser)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
            .args(["--remote-debugging-pipe", "--window-size=1400,1100"])
            .arg(format!("--user-data-dir={}", profile.path().join("profile").display()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("the browser starts");
        let (sender, receiver) = channel();
        std::thread::spawn(move || {
            for message in BufReader::new(from).split(0).map_while(Result::ok) {
                let parsed = serde_json::from_slice(&message).expect("messages are JSON");
                if sender.send(parsed).is_err() {
                    break;
                }
            }
        });
        let mut page = Page {
            child,
            to,
            from: receiver,
            next: 0,
            session: Value::Null,
            failures: Vec::new(),
            _profile: profile,
        };
        let target = page.ask("Target.createTarget", json!({"url": "about:blank"}));
        let attach = json!({"targetId": target["targetId"], "flatten": true});
        let session = page.ask("Target.attachToTarget", attach)["sessionId"].clone();
        page.session = session;
        page.ask("Runtime.enable", json!({}));
        page.ask("Page.enable", json!({}));
        page.ask("Page.navigate", json!({"url": url}));
        Some(page)
    }

    /// A command's result.
    fn ask(&mut self, method: &str, params: Value) -> Value {
        let answer = self.answer(method, params);
        assert!(answer["error"].is_null(), "{method}: {answer}");
        answer["result"].clone()
    }

    fn answer(&mut self, method: &str, params: Value) -> Value {
        self.next += 1;
        let id = self.next;
        let mut message = json!({"id": id, "method": method, "params": params});
        if self.session.is_string() {
            message["sessionId"] = self.session.clone();
        }
        self.to.write_all(format!("{message}\0").as_bytes()).expect("the browser listens");
        let until = Instant::now() + PATIENCE;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let Ok(answer) = self.from.recv_timeout(left) else {
                panic!("no answer to {method}: {:?}", self.child.try_wait());
            };
            if answer["method"] == "Runtime.exceptionThrown" {
                self.failures.push(answer["params"].to_string());
            }
            if answer["id"] == id {
                return answer;
            }
        }
    }

    fn evaluate(&mut self, expression: &str) -> Value {
        let params = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        self.answer("Runtime.evaluate", params)
    }

    /// The value of an expression in the page.
    pub fn value(&mut self, expression: &str) -> Value {
        let answer = self.evaluate(expression);
        let failed = !answer["error"].is_null() || !answer["result"]["exceptionDetails"].is_null();
        assert!(!failed, "{expression}: {answer}");
        answer["result"]["result"]["value"].clone()
    }

    /// Loads the page again.
    pub fn reload(&mut self) {
        self.value("window.isOld = true; location.reload()");
        self.until("window.isOld === undefined && document.readyState === 'complete'");
    }

    /// Waits until an expression is true.
    pub fn until(&mut self, expression: &str) {
        let until = Instant::now() + PATIENCE;
        // Between two pages there is nothing to ask.
        while self.evaluate(expression)["result"]["result"]["value"] != Value::Bool(true) {
            if Instant::now() > until {
                let text = self.value("document.body.innerText");
                panic!("not true: {expression}; on the page:\n{text}\n{:?}", self.failures);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits until an element is there and has this text in it.
    pub fn shows(&mut self, id: &str, text: &str) {
        let (id, text) = (Value::from(id), Value::from(text));
        self.until(&format!(
            "(e => !!e && e.checkVisibility() && e.innerText.includes({text}))(document.getElementById({id}))"
        ));
    }

    /// Fills a field.
    pub fn fill(&mut self, id: &str, text: &str) {
        let (id, text) = (Value::from(id), Value::from(text));
        self.value(&format!("document.getElementById({id}).value = {text}"));
    }

    pub fn click(&mut self, id: &str) {
        let id = Value::from(id);
        self.until(&format!(
            "(e => e.checkVisibility() && !e.disabled)(document.getElementById({id}))"
        ));
        self.value(&format!("document.getElementById({id}).click()"));
    }

    /// Writes a picture of the page as PNG.
    pub fn picture(&mut self, file: &OsStr) {
        let answer = self.ask("Page.captureScreenshot", json!({"format": "png"}));
        let data = answer["data"].as_str().expect("a picture");
        let out = File::create(file).expect("a file");
        let mut decode = Command::new("base64")
            .arg("-d")
            .stdin(Stdio::piped())
            .stdout(out)
            .spawn()
            .expect("base64 runs");
        let mut to = decode.stdin.take().expect("its input");
        to.write_all(data.as_bytes()).expect("written");
        drop(to);
        assert!(decode.wait().expect("base64 ends").success());
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
