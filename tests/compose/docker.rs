//! Containers of `docker-compose.yml` under a project name of their own. All that was made goes away with [`Project`].

use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How long an engine may take to say that it is there.
const ENGINE_PATIENCE: Duration = Duration::from_secs(10);
/// A step of compose: a process starts up to a few seconds after those that it depends on.
const COMPOSE_LIMIT: Duration = Duration::from_secs(120);
const IMAGE_LIMIT: Duration = Duration::from_secs(120);

/// The repository: the working directory of every command, so that the file's paths are right.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// What a command did within its time.
pub struct Ran {
    status: Option<ExitStatus>,
    /// Output and errors, in the order in which they were written.
    pub text: String,
}

impl Ran {
    pub fn succeeded(&self) -> bool {
        self.status.is_some_and(|s| s.success())
    }
}

/// Runs a command, which is killed when its time is over: then it has no status.
pub fn run(command: &mut Command, limit: Duration) -> std::io::Result<Ran> {
    let mut output: File = tempfile::tempfile()?;
    command.current_dir(root()).stdin(Stdio::null());
    command.stdout(output.try_clone()?).stderr(output.try_clone()?);
    let mut child = command.spawn()?;
    let deadline = Instant::now() + limit;
    let status = loop {
        match child.try_wait()? {
            Some(status) => break Some(status),
            None if Instant::now() > deadline => {
                child.kill()?;
                child.wait()?;
                break None;
            }
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    let mut bytes = Vec::new();
    output.rewind()?;
    output.read_to_end(&mut bytes)?;
    Ok(Ran { status, text: String::from_utf8_lossy(&bytes).into_owned() })
}

/// With this in the environment nothing is skipped.
const REQUIRED: &str = "MILLRACE_REQUIRE_CONTAINERS";
/// Names a file that what is skipped is added to, a line each; `test.sh` counts them.
const SKIPPED: &str = "MILLRACE_SKIPPED_TESTS";

/// Why the test cannot be run on this machine.
pub struct Skipped(pub String);

impl Skipped {
    /// Says so where it is seen: what a test that passes has printed is not.
    pub fn tell(self) {
        let Skipped(reason) = self;
        let is_required = std::env::var_os(REQUIRED).is_some_and(|value| !value.is_empty());
        assert!(
            !is_required,
            "the cluster is not started in containers, and {REQUIRED} is set: {reason}"
        );
        let line = format!("compose: the cluster was not started in containers: {}", reason.trim());
        eprintln!("skipped: {line}");
        if let Some(file) = std::env::var_os(SKIPPED) {
            let file = File::options().append(true).create(true).open(file);
            let written = file.and_then(|mut f| writeln!(f, "{}", line.replace('\n', " ")));
            written.unwrap_or_else(|e| panic!("{SKIPPED}: {e}"));
        }
    }
}

/// Whether a program answers, and what it is called.
fn answers(program: &[&str], argument: &str) -> bool {
    let mut command = Command::new(program[0]);
    command.args(&program[1..]).arg(argument);
    run(&mut command, ENGINE_PATIENCE).is_ok_and(|ran| ran.succeeded())
}

/// The cluster's containers, networks, volumes and images.
pub struct Project {
    compose: &'static [&'static str],
    name: String,
}

impl Project {
    /// Makes images of the binaries under test, and starts nothing.
    pub fn prepare() -> Result<Project, Skipped> {
        if !answers(&["docker"], "info") {
            return Err(Skipped("docker info does not answer".to_owned()));
        }
        let known: [&'static [&'static str]; 2] = [&["docker-compose"], &["docker", "compose"]];
        let compose = known.into_iter().find(|c| answers(c, "version"));
        let compose = compose.ok_or_else(|| Skipped("there is no docker-compose".to_owned()))?;
        let base = run(&mut Command::new(root().join("docker/base-image.sh")), IMAGE_LIMIT);
        match base {
            Ok(ran) if ran.succeeded() => {}
            Ok(ran) => return Err(Skipped(format!("there are no base images: {}", ran.text))),
            Err(error) => return Err(Skipped(format!("docker/base-image.sh: {error}"))),
        }
        let directory = binaries()?;
        let project = Project { compose, name: format!("millrace-test-{}", std::process::id()) };
        project.build(directory);
        Ok(project)
    }

    /// A build context of its own holds the binaries and nothing else.
    fn build(&self, binaries: &Path) {
        let context = tempfile::tempdir().expect("a temporary directory");
        fs::create_dir_all(context.path().join("docker/data")).expect("it is ours");
        let mut strip = Command::new(root().join("docker/binaries.sh"));
        strip.arg(binaries).arg(context.path().join("docker/bin"));
        let ran = run(&mut strip, IMAGE_LIMIT).expect("the script is there");
        assert!(ran.succeeded(), "docker/binaries.sh: {}", ran.text);
        let proxy = "docker/haproxy.cfg";
        fs::copy(root().join(proxy), context.path().join(proxy)).expect("the file is there");
        for (target, tag) in [("runtime", &self.name), ("runtime-proxy", &self.proxy())] {
            let mut build = Command::new("docker");
            build.args(["build", "--target", target, "--tag", tag, "--file", "Dockerfile"]);
            let ran = run(build.arg(context.path()), IMAGE_LIMIT).expect("docker was there");
            assert!(ran.succeeded(), "docker build: {}", ran.text);
        }
    }

    /// The image of the proxy.
    fn proxy(&self) -> String {
        format!("{}-proxy", self.name)
    }

    fn compose(&self, arguments: &[&str]) -> Ran {
        let mut command = Command::new(self.compose[0]);
        // The file is the one that is found in the working directory.
        command.args(&self.compose[1..]).args(["-p", &self.name]).env_remove("COMPOSE_FILE");
        command.args(arguments).env("MILLRACE_IMAGE", &self.name);
        command.env("MILLRACE_PROXY_IMAGE", self.proxy());
        // The engine chooses free ports.
        command.env("MILLRACE_PORT", "0").env("MILLRACE_CONSOLE_PORT", "0");
        // A bucket that somebody works with stays out of it.
        for name in ["MILLRACE_OBJECT_STORE", "AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID"] {
            command.env_remove(name);
        }
        for name in ["AWS_SECRET_ACCESS_KEY", "AWS_REGION"] {
            command.env_remove(name);
        }
        run(&mut command, COMPOSE_LIMIT).expect("compose was there")
    }

    fn composed(&self, arguments: &[&str]) -> String {
        let ran = self.compose(arguments);
        assert!(ran.succeeded(), "compose {arguments:?}: {}\n{}", ran.text, self.logs());
        ran.text
    }

    /// Whether a file beside the one that is found by itself describes services.
    pub fn can_read(&self, file: &str) {
        self.composed(&["-f", file, "config", "--quiet"]);
    }

    /// Starts what does not run.
    pub fn up(&self) {
        self.composed(&["up", "-d", "--no-build"]);
    }

    /// `kill -9` of a service's process. The engine does not start a container again that was killed by its command.
    pub fn kill(&self, service: &str) {
        self.composed(&["kill", "-s", "KILL", service]);
    }

    /// Where a service is reached from this machine. Each start has another port.
    pub fn address(&self, service: &str, port: &str) -> String {
        let text = self.composed(&["port", service, port]);
        let address = text.lines().rfind(|line| line.starts_with("127.0.0.1:"));
        address.unwrap_or_else(|| panic!("{service} is not published: {text}")).to_owned()
    }

    /// Which services run: one a line.
    pub fn running(&self) -> String {
        let mut list = Command::new("docker");
        list.args(["ps", "--format", "{{.Names}} {{.Status}}", "--filter", "status=running"]);
        list.args(["--filter", &format!("label=com.docker.compose.project={}", self.name)]);
        run(&mut list, COMPOSE_LIMIT).expect("docker was there").text
    }

    pub fn logs(&self) -> String {
        self.compose(&["logs", "--no-color", "--tail=40"]).text
    }
}

impl Drop for Project {
    fn drop(&mut self) {
        let down = self.compose(&["down", "--volumes", "--timeout", "0"]);
        let mut remove = Command::new("docker");
        let removed = run(remove.args(["image", "rm", &self.proxy(), &self.name]), COMPOSE_LIMIT);
        for ran in [Ok(down), removed] {
            match ran {
                Ok(ran) if ran.succeeded() => {}
                Ok(ran) => eprintln!("{} is not removed: {}", self.name, ran.text),
                Err(error) => eprintln!("{} is not removed: {error}", self.name),
            }
        }
    }
}

/// The directory of the binaries under test.
fn binaries() -> Result<&'static Path, Skipped> {
    let server = Path::new(env!("CARGO_BIN_EXE_millrace"));
    let directory = server.parent().expect("a binary is in a directory");
    let store: PathBuf = directory.join("millrace-s3");
    match store.exists() {
        true => Ok(directory),
        false => Err(Skipped(format!("{} is not built: --workspace does", store.display()))),
    }
}
