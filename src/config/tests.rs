use millrace_storage::TailLimits;

use super::*;

/// The help states them in the form in which they can be given.
#[test]
fn defaults_of_the_tail_are_those_that_the_help_states() {
    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        _options: Options,
    }
    let command = <Line as clap::CommandFactory>::command();
    let stated = |id: &str| {
        let flag = command.get_arguments().find(|arg| arg.get_id().as_str() == id).unwrap();
        let help = flag.get_help().unwrap().to_string();
        let (_, default) = help.rsplit_once("[default: ").unwrap();
        default.trim_end_matches(']').to_owned()
    };
    let tail = TailLimits::default();
    assert_eq!(stated("flush_commits"), tail.slices.to_string());
    assert_eq!(duration("--flush-age", &stated("flush_age")).unwrap(), tail.age);
}

#[test]
fn what_nobody_can_call_is_not_advertised() {
    for text in ["10.0.0.2:4571", "compute-1:1", "a_b.example:7", "[::1]:65535"] {
        assert_eq!(advertised(text.into()).unwrap(), text);
    }
    let nowhere = [
        ":4571",
        "",
        ":",
        "host",
        "host:",
        "host:0",
        "host:65536",
        "host:x",
        "0.0.0.0:4571",
        "[::]:4571",
        "[::ffff:0.0.0.0]:4571",
        "[]:1",
        "::1:4571",
        "http://host:4571",
        "user@host:4571",
        "two hosts:4571",
        "host:+4571",
    ];
    for text in nowhere {
        let given = Options { advertise: Some(text.into()), ..Options::default() };
        let error = given.resolve().unwrap_err().to_string();
        let value = format!("invalid value for --advertise: \"{text}\" (expected the host");
        assert!(error.starts_with(&value), "{error}");
    }
}

#[test]
fn flags_win_over_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("millrace.toml");
    std::fs::write(
        &path,
        "listen = \"127.0.0.1:1\"\nmemory-limit = \"1GB\"\nallow-path = [\"/a\", \"/b\"]\n",
    )
    .unwrap();
    let config = Options {
        config: Some(path.clone()),
        listen: Some("127.0.0.1:2".into()),
        ..Options::default()
    }
    .resolve()
    .unwrap();
    assert_eq!(config.listen, "127.0.0.1:2");
    assert_eq!(config.memory_limit, 1_000_000_000);
    assert_eq!(config.access.allow_paths, [Path::new("/a"), Path::new("/b")]);
    assert_eq!(config.http, Http::IfFree("127.0.0.1:1127".into()));
    // What is switched on there can be switched off here.
    std::fs::write(&path, "take-over = true\nrequire-password = true\n").unwrap();
    let of_file = Options { config: Some(path.clone()), ..Options::default() };
    let config = of_file.clone().resolve().unwrap();
    assert!(config.take_over && config.access.require_password);
    let off = Options { take_over: Some(false), require_password: Some(false), ..of_file };
    let config = off.resolve().unwrap();
    assert!(!config.take_over && !config.access.require_password);
    assert_eq!(Http::from_option(Some("off".into()), "127.0.0.1:1"), Http::Off);
    assert_eq!(beside("127.0.0.1:4566").as_deref(), Some("127.0.0.1:5691"));
    assert_eq!(beside("127.0.0.1:65000"), None);

    std::fs::write(&path, "lissten = \"127.0.0.1:1\"\n").unwrap();
    let error = Options { config: Some(path), ..Options::default() }.resolve().unwrap_err();
    assert!(error.to_string().contains("lissten"), "{error}");
}
