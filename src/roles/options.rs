//! What a person can set about a process of a cluster, beyond what a standalone server has.

use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{ArgMatches, Args, ValueEnum};
use serde::Deserialize;

use crate::config::{Config, ConfigError, Options, callable, parsed, read_file};

/// What a process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Meta,
    Frontend,
    Compute,
    Compactor,
}

impl Role {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Role::Meta => "meta",
            Role::Frontend => "frontend",
            Role::Compute => "compute",
            Role::Compactor => "compactor",
        }
    }

    /// A frontend's is for psql and drivers.
    fn default_listen(self) -> &'static str {
        match self {
            Role::Frontend => "127.0.0.1:4566",
            Role::Meta => "127.0.0.1:4570",
            Role::Compute => "127.0.0.1:4571",
            Role::Compactor => "127.0.0.1:4572",
        }
    }
}

/// How a frontend knows who connects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Auth {
    /// By passwords, unless only this machine can connect
    #[default]
    Password,
    /// It believes everybody
    Trust,
}

/// Flags of `millrace meta | frontend | compute | compactor`; each can also be given by environment or in the config file.
#[derive(Args, Clone, Debug, Default)]
pub struct ClusterOptions {
    #[command(flatten)]
    pub process: Options,

    #[command(flatten)]
    pub cluster: ClusterFlags,
}

/// Those that a standalone server does not have.
#[derive(Args, Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct ClusterFlags {
    /// Where the meta processes listen, of which one leads
    #[arg(
        long,
        env = "MILLRACE_META",
        value_name = "HOST:PORT,...",
        value_delimiter = ',',
        help_heading = "Cluster"
    )]
    pub meta: Vec<String>,

    /// Listens beyond this machine for calls of other processes, which are neither encrypted nor authenticated: for
    /// networks that nobody else can reach
    #[arg(
        long,
        env = "MILLRACE_INSECURE_RPC",
        value_name = "true|false",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        hide_possible_values = true,
        help_heading = "Cluster"
    )]
    pub insecure_rpc: Option<bool>,

    /// Certificate chain (PEM) with which this process proves to others who it is; with it, calls between processes are
    /// encrypted, and both sides need a certificate of the same CA
    #[arg(long, env = "MILLRACE_RPC_TLS_CERT", value_name = "FILE", help_heading = "Cluster")]
    pub rpc_tls_cert: Option<PathBuf>,

    /// Private key (PEM) of --rpc-tls-cert
    #[arg(long, env = "MILLRACE_RPC_TLS_KEY", value_name = "FILE", help_heading = "Cluster")]
    pub rpc_tls_key: Option<PathBuf>,

    /// Certificates (PEM) of the CA that other processes are checked by
    #[arg(long, env = "MILLRACE_RPC_TLS_CA", value_name = "FILE", help_heading = "Cluster")]
    pub rpc_tls_ca: Option<PathBuf>,

    /// How a frontend knows who connects
    #[arg(long, env = "MILLRACE_AUTH", value_enum, help_heading = "Cluster")]
    pub auth: Option<Auth>,
}

/// Names of the above in the config file.
const CLUSTER_KEYS: [&str; 6] =
    ["meta", "insecure-rpc", "rpc-tls-cert", "rpc-tls-key", "rpc-tls-ca", "auth"];

/// Flags that not every role heeds.
struct Group {
    /// As clap names them.
    flags: &'static [&'static str],
    roles: &'static [Role],
    /// How an error names who heeds them.
    whose: &'static str,
}

/// Every flag that is in none of these is heeded by all roles.
const GROUPS: [Group; 6] = [
    // About sessions of clients.
    Group {
        flags: &[
            "auth",
            "tls_cert",
            "tls_key",
            "require_password",
            "max_connections",
            "max_pending_connections",
            "authentication_timeout",
        ],
        roles: &[Role::Frontend],
        whose: "millrace frontend",
    },
    // About files that sources and sinks use, which are opened there.
    Group {
        flags: &["allow_path"],
        roles: &[Role::Frontend, Role::Compute],
        whose: "millrace frontend and compute",
    },
    // About the log, and what the leader says to all jobs.
    Group {
        flags: &[
            "max_clock_skew",
            "barrier_interval",
            "parallelism",
            "step_size",
            "snapshot_records",
            "gc_interval",
        ],
        roles: &[Role::Meta],
        whose: "millrace meta",
    },
    // About what jobs write.
    Group {
        flags: &[
            "flush_size",
            "direct_run_size",
            "inline_size",
            "flush_commits",
            "flush_age",
            "tail_size",
        ],
        roles: &[Role::Compute],
        whose: "millrace compute",
    },
    // About reads of runs, and where their blocks are kept.
    Group {
        flags: &["disk_cache", "disk_cache_admission", "min_reads", "max_reads", "hedge_reads"],
        roles: &[Role::Frontend, Role::Compute, Role::Compactor],
        whose: "millrace frontend, compute and compactor",
    },
    Group { flags: &["take_over", "loopback"], roles: &[], whose: "millrace standalone" },
];

/// Files that a process proves who it is with, and checks others by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RpcTlsFiles {
    pub cert: PathBuf,
    pub key: PathBuf,
    pub ca: PathBuf,
}

/// Resolved settings of a process of a cluster.
#[derive(Clone, Debug)]
pub struct RoleConfig {
    pub role: Role,
    pub process: Config,
    /// Where the meta processes listen, of which one leads. Of a meta process the others, and itself or not.
    pub metas: Vec<String>,
    pub insecure_rpc: bool,
    /// `None`: calls between processes are neither encrypted nor authenticated.
    pub rpc_tls: Option<RpcTlsFiles>,
    pub auth: Auth,
}

impl ClusterFlags {
    fn completed_from(self, file: ClusterFlags) -> ClusterFlags {
        ClusterFlags {
            meta: if self.meta.is_empty() { file.meta } else { self.meta },
            insecure_rpc: self.insecure_rpc.or(file.insecure_rpc),
            rpc_tls_cert: self.rpc_tls_cert.or(file.rpc_tls_cert),
            rpc_tls_key: self.rpc_tls_key.or(file.rpc_tls_key),
            rpc_tls_ca: self.rpc_tls_ca.or(file.rpc_tls_ca),
            auth: self.auth.or(file.auth),
        }
    }

    pub(crate) fn rpc_tls(&self) -> Result<Option<RpcTlsFiles>, ConfigError> {
        let files = [
            ("--rpc-tls-cert", &self.rpc_tls_cert),
            ("--rpc-tls-key", &self.rpc_tls_key),
            ("--rpc-tls-ca", &self.rpc_tls_ca),
        ];
        if let [(_, Some(cert)), (_, Some(key)), (_, Some(ca))] = files {
            let (cert, key, ca) = (cert.clone(), key.clone(), ca.clone());
            return Ok(Some(RpcTlsFiles { cert, key, ca }));
        }
        let first = |is_given: bool| files.iter().find(|(_, file)| file.is_some() == is_given);
        match (first(true), first(false)) {
            (Some((given, _)), Some((missing, _))) => {
                let why = "certificate, key and CA of calls between processes go together";
                Err(ConfigError::Half { given, missing, why })
            }
            _ => Ok(None),
        }
    }
}

/// The addresses that --meta names. Commas may have blanks or nothing beside them.
pub(crate) fn meta_addresses(given: &[String]) -> Result<Vec<String>, ConfigError> {
    let expected = "the host and the port of each meta process, as 10.0.0.1:4570,10.0.0.5:4570";
    let named = given.iter().map(|address| address.trim()).filter(|address| !address.is_empty());
    named.map(|address| callable("--meta", address.to_owned(), expected)).collect()
}

/// The config file: flags of all processes, and those of a cluster's.
fn read_cluster_file(path: &Path) -> Result<(Options, ClusterFlags), ConfigError> {
    let mut file: toml::Table = parsed(path, toml::from_str(&read_file(path)?))?;
    let mut cluster = toml::Table::new();
    for key in CLUSTER_KEYS {
        cluster.extend(file.remove_entry(key));
    }
    Ok((parsed(path, file.try_into())?, parsed(path, cluster.try_into())?))
}

impl ClusterOptions {
    /// Refuses what was given on the command line and that this role would not heed. Environment and config file may be
    /// those of all processes.
    pub fn check_flags(role: Role, given: &ArgMatches) -> Result<(), ConfigError> {
        let foreign = GROUPS.iter().filter(|group| !group.roles.contains(&role));
        let mut foreign =
            foreign.flat_map(|group| group.flags.iter().map(move |flag| (*flag, group.whose)));
        let on_line = |id: &str| given.value_source(id) == Some(ValueSource::CommandLine);
        match foreign.find(|(flag, _)| on_line(flag)) {
            Some((flag, whose)) => {
                let flag = flag.replace('_', "-");
                Err(ConfigError::Foreign { flag, role: role.name(), whose })
            }
            None => Ok(()),
        }
    }

    /// These, and where one is not given, that of the config file.
    fn completed(self) -> Result<(Options, ClusterFlags), ConfigError> {
        let ClusterOptions { mut process, cluster } = self;
        let Some(path) = process.config.take() else { return Ok((process, cluster)) };
        let (file, cluster_file) = read_cluster_file(&path)?;
        Ok((process.completed_from(file), cluster.completed_from(cluster_file)))
    }

    /// Checks what a role needs, and fills in what was not given.
    pub fn resolve(self, role: Role) -> Result<RoleConfig, ConfigError> {
        let (mut process, flags) = self.completed()?;
        let rpc_tls = flags.rpc_tls()?;
        let ClusterFlags { meta, insecure_rpc, auth, .. } = flags;
        let asks = process.require_password == Some(true);
        match role {
            Role::Frontend if auth == Some(Auth::Trust) && asks => {
                return Err(ConfigError::Contradiction {
                    one: "--auth",
                    other: "--require-password",
                    why: "trust asks nobody for a password".to_owned(),
                });
            }
            Role::Frontend => {}
            // A file of all processes may have half of what a frontend is given.
            Role::Meta | Role::Compute | Role::Compactor => {
                (process.tls_cert, process.tls_key) = (None, None);
            }
        }
        if process.listen.is_none() {
            process.listen = Some(role.default_listen().to_owned());
        }
        if process.data_dir.is_none() {
            process.data_dir = Some(PathBuf::from("millrace-data").join(role.name()));
        }
        if process.object_store.is_none() {
            return Err(ConfigError::Missing {
                name: "--object-store",
                why: "the processes of a cluster share one: file:///path or s3://bucket/prefix",
            });
        }
        let metas = meta_addresses(&meta)?;
        if role != Role::Meta && metas.is_empty() {
            return Err(ConfigError::Missing {
                name: "--meta",
                why: "this process needs to know where the meta processes listen",
            });
        }
        let process = process.resolve()?;
        Ok(RoleConfig {
            role,
            process,
            metas,
            insecure_rpc: insecure_rpc.unwrap_or_default(),
            rpc_tls,
            auth: auth.unwrap_or_default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        options: ClusterOptions,
    }

    const ROLES: &[Role] = &[Role::Meta, Role::Frontend, Role::Compute, Role::Compactor];

    fn check(role: Role, line: &[&str]) -> Result<(), String> {
        let line = [&"millrace"].into_iter().chain(line);
        let given = <Line as clap::CommandFactory>::command().get_matches_from(line);
        ClusterOptions::check_flags(role, &given).map_err(|e| e.to_string())
    }

    fn given(meta: &[&str]) -> ClusterOptions {
        let process = Options { object_store: Some("file:///tmp/x".into()), ..Options::default() };
        let meta = meta.iter().map(|m| (*m).to_owned()).collect();
        ClusterOptions { process, cluster: ClusterFlags { meta, ..ClusterFlags::default() } }
    }

    #[test]
    fn a_role_has_an_address_and_a_directory_of_its_own() {
        let compute = given(&["m:1"]).resolve(Role::Compute).unwrap();
        assert_eq!(
            (compute.process.listen.as_str(), compute.metas),
            ("127.0.0.1:4571", vec!["m:1".to_owned()])
        );
        assert!(compute.process.data_dir.ends_with("millrace-data/compute"));
        let frontend = given(&["m:1"]).resolve(Role::Frontend).unwrap();
        assert_eq!(frontend.process.listen, "127.0.0.1:4566");
    }

    #[test]
    fn what_a_role_cannot_do_without_is_named() {
        let error = given(&[]).resolve(Role::Frontend).unwrap_err().to_string();
        assert!(error.contains("--meta"), "{error}");
        let error = ClusterOptions::default().resolve(Role::Meta).unwrap_err().to_string();
        assert!(error.contains("--object-store"), "{error}");
        let several = given(&["a:1", " b:1"]);
        for role in [Role::Meta, Role::Compute] {
            assert_eq!(several.clone().resolve(role).unwrap().metas, ["a:1", "b:1"]);
        }
        assert!(given(&[]).resolve(Role::Meta).unwrap().metas.is_empty());
    }

    #[test]
    fn meta_processes_are_named_by_host_and_port() {
        for &role in ROLES {
            for bad in [
                "10.0.0.1",
                "meta-1:",
                ":4570",
                "meta-1:port",
                "m:0",
                "0.0.0.0:4570",
                "http://meta-1:4570",
            ] {
                let error = given(&["a:1", bad]).resolve(role).unwrap_err().to_string();
                let value = format!("invalid value for --meta: \"{bad}\" (expected the host");
                assert!(error.starts_with(&value), "{error}");
            }
            let sparse = given(&["a:1", "", " [::1]:2 ", " "]).resolve(role).unwrap();
            assert_eq!(sparse.metas, ["a:1", "[::1]:2"]);
        }
        let error = given(&[""]).resolve(Role::Compute).unwrap_err().to_string();
        assert!(error.starts_with("--meta is missing"), "{error}");
    }

    #[test]
    fn the_config_file_has_the_flags_of_a_cluster_too() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("millrace.toml");
        let with = |text: &str| {
            std::fs::write(&path, text).unwrap();
            let process = Options { config: Some(path.clone()), ..Options::default() };
            ClusterOptions { process, ..ClusterOptions::default() }
        };
        let text = "object-store = \"file:///x\"\nmeta = [\"m:1\"]\nadvertise = \"c:2\"\n\
                    rpc-tls-cert = \"a\"\nrpc-tls-key = \"b\"\nrpc-tls-ca = \"c\"\nauth = \"trust\"\n\
                    insecure-rpc = true\n";
        let config = with(text).resolve(Role::Frontend).unwrap();
        let advertise = config.process.advertise.as_deref();
        assert_eq!((config.metas, advertise), (vec!["m:1".into()], Some("c:2")));
        assert_eq!((config.auth, config.insecure_rpc), (Auth::Trust, true));
        assert_eq!(config.rpc_tls.map(|files| files.ca), Some("c".into()));
        // What is in neither has the role's default, and flags win.
        assert_eq!(config.process.listen, "127.0.0.1:4566");
        let mut options = with(text);
        options.cluster.meta = vec!["n:1".into()];
        options.process.listen = Some("127.0.0.1:9".into());
        let config = options.resolve(Role::Compute).unwrap();
        let (metas, listen) = (config.metas, config.process.listen);
        assert_eq!((metas, listen.as_str()), (vec!["n:1".to_owned()], "127.0.0.1:9"));

        let error = with("metta = [\"m:1\"]\n").resolve(Role::Compute).unwrap_err().to_string();
        assert!(error.contains("metta"), "{error}");
        let error = with("auth = \"nobody\"\n").resolve(Role::Compute).unwrap_err().to_string();
        assert!(error.contains("nobody"), "{error}");
        let error = with("object-store = \"file:///x\"\nmeta = [\"m:1\"]\nrpc-tls-cert = \"a\"\n");
        let error = error.resolve(Role::Compute).unwrap_err().to_string();
        assert!(error.contains("--rpc-tls-key"), "{error}");
    }

    #[test]
    fn what_sessions_need_is_checked_where_there_are_sessions() {
        let trusting = |asks: bool| {
            let mut options = given(&["m:1"]);
            options.cluster.auth = Some(Auth::Trust);
            options.process.require_password = Some(asks);
            options
        };
        let error = trusting(true).resolve(Role::Frontend).unwrap_err().to_string();
        let told = "--auth and --require-password contradict each other: trust asks nobody";
        assert!(error.starts_with(told), "{error}");
        assert!(trusting(false).resolve(Role::Frontend).is_ok());
        for half in ["--tls-cert", "--tls-key"] {
            let mut options = given(&["m:1"]);
            let file = Some(PathBuf::from("x"));
            match half {
                "--tls-cert" => options.process.tls_cert = file,
                _ => options.process.tls_key = file,
            }
            let error = options.clone().resolve(Role::Frontend).unwrap_err().to_string();
            assert!(error.contains(&format!(" is missing, and {half} is given: ")), "{error}");
            for role in [Role::Meta, Role::Compute, Role::Compactor] {
                assert!(options.clone().resolve(role).is_ok(), "{half}");
                assert!(trusting(true).resolve(role).is_ok());
            }
        }
    }

    /// An environment or a file of all processes may have them.
    #[test]
    fn values_out_of_range_are_refused_by_every_role() {
        for &role in ROLES {
            let mut options = given(&["m:1"]);
            options.process.gc_interval = Some("0".into());
            let error = options.resolve(role).unwrap_err().to_string();
            assert!(error.contains("--gc-interval") && error.contains("10ms to 5d"), "{error}");
            let mut options = given(&["m:1"]);
            options.process.authentication_timeout = Some("0".into());
            let error = options.resolve(role).unwrap_err().to_string();
            assert!(error.contains("--authentication-timeout"), "{error}");
        }
    }

    #[test]
    fn the_address_of_metrics_has_two_names() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("millrace.toml");
        std::fs::write(&path, "metrics-listen = \"127.0.0.1:7\"\n").unwrap();
        let file = path.display().to_string();
        let line = ["millrace", "--object-store", "file:///x"];
        for (given, address) in [
            (["--metrics-listen", "127.0.0.1:8"], "127.0.0.1:8"),
            (["--http", "127.0.0.1:8"], "127.0.0.1:8"),
            (["--config", &file], "127.0.0.1:7"),
        ] {
            let line = line.into_iter().chain(given);
            let options = <Line as clap::Parser>::parse_from(line).options;
            let config = options.resolve(Role::Meta).unwrap();
            assert_eq!(config.process.http.address(), Some(address), "{given:?}");
        }
    }

    #[test]
    fn keys_of_a_cluster_are_those_of_its_flags() {
        let keys = toml::Table::from_iter(
            CLUSTER_KEYS.map(|key| (key.to_owned(), toml::Value::Boolean(true))),
        );
        for key in CLUSTER_KEYS {
            let one = toml::Table::from_iter([(key.to_owned(), keys[key].clone())]);
            // A key that is not known would be passed over; these are of the wrong type, but for one.
            let read: Result<ClusterFlags, _> = one.try_into();
            assert_eq!(read.is_ok(), key == "insecure-rpc", "{key}");
        }
    }

    #[test]
    fn a_flag_that_a_role_would_not_heed_is_refused() {
        use Role::{Compactor, Compute, Frontend, Meta};
        let by_all = ["listen", "http", "metrics-listen", "advertise", "data-dir", "object-store"];
        let by_all = by_all.map(|flag| (flag, ROLES, ""));
        for (flag, heeded, whose) in [
            ("memory-limit", ROLES, ""),
            ("rpc-tls-ca", ROLES, ""),
            ("config", ROLES, ""),
            ("meta", ROLES, ""),
            ("allow-path", &[Frontend, Compute], "millrace frontend and compute"),
            ("authentication-timeout", &[Frontend], "millrace frontend"),
            ("max-clock-skew", &[Meta], "millrace meta"),
            ("barrier-interval", &[Meta], "millrace meta"),
            ("gc-interval", &[Meta], "millrace meta"),
            ("flush-age", &[Compute], "millrace compute"),
            (
                "disk-cache",
                &[Frontend, Compute, Compactor],
                "millrace frontend, compute and compactor",
            ),
        ]
        .into_iter()
        .chain(by_all)
        {
            for &role in ROLES {
                let said = check(role, &[&format!("--{flag}=1")]);
                let refused = format!("--{flag} has no meaning for millrace {}: ", role.name());
                match heeded.contains(&role) {
                    true => assert_eq!(said, Ok(()), "{flag}"),
                    false => assert_eq!(said, Err(format!("{refused}it is for {whose}"))),
                }
            }
        }
        for &role in ROLES {
            let refused = |flag: &str| {
                let name = role.name();
                Err(format!(
                    "{flag} has no meaning for millrace {name}: it is for millrace standalone"
                ))
            };
            assert_eq!(check(role, &["--take-over"]), refused("--take-over"));
            assert_eq!(check(role, &["--loopback", "encode"]), refused("--loopback"));
            assert_eq!(check(role, &["--insecure-rpc", "--log-format=json"]), Ok(()));
            // What the command line does not have is heeded or not.
            assert_eq!(check(role, &[]), Ok(()));
        }
        assert_eq!(check(Meta, &["--parallelism=2", "--step-size=1MB"]), Ok(()));
        assert!(check(Compute, &["--listen=c:1", "--parallelism=2"]).is_err());
        assert!(check(Compactor, &["--parallelism=2"]).is_err());
    }

    /// A flag that is added says here whose it is.
    #[test]
    fn every_flag_is_of_one_group_or_of_all_roles() {
        const OF_ALL: [&str; 13] = [
            "listen",
            "http",
            "advertise",
            "data_dir",
            "object_store",
            "memory_limit",
            "log_format",
            "config",
            "meta",
            // Those of a frontend go to others unencrypted, too.
            "insecure_rpc",
            "rpc_tls_cert",
            "rpc_tls_key",
            "rpc_tls_ca",
        ];
        let groups = GROUPS.iter().flat_map(|group| group.flags);
        let mut listed: Vec<&str> = groups.copied().chain(OF_ALL).collect();
        listed.sort_unstable();
        let command = <Line as clap::CommandFactory>::command();
        let flags = command.get_arguments().map(|flag| flag.get_id().as_str());
        let mut flags: Vec<&str> = flags.filter(|flag| *flag != "help").collect();
        flags.sort_unstable();
        assert_eq!(listed, flags);
    }
}
