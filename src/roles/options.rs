//! What a person can set about a process of a cluster, beyond what a standalone server has.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use crate::config::{Config, ConfigError, Options};

/// What a process does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Meta,
    Frontend,
    Compute,
    Compactor,
}

impl Role {
    fn name(self) -> &'static str {
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
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Auth {
    /// By passwords, unless only this machine can connect
    #[default]
    Password,
    /// It believes everybody
    Trust,
}

/// Flags of `millrace meta | frontend | compute | compactor`; each can also be given by environment.
#[derive(Args, Clone, Debug, Default)]
pub struct ClusterOptions {
    #[command(flatten)]
    pub process: Options,

    /// Where other processes reach this one [default: the address of --listen]
    #[arg(long, env = "MILLRACE_ADVERTISE", value_name = "HOST:PORT", help_heading = "Cluster")]
    pub advertise: Option<String>,

    /// Where the meta process listens
    #[arg(
        long,
        env = "MILLRACE_META",
        value_name = "HOST:PORT",
        value_delimiter = ',',
        help_heading = "Cluster"
    )]
    pub meta: Vec<String>,

    /// Listens beyond this machine for calls of other processes, which are neither encrypted nor authenticated: for
    /// networks that nobody else can reach
    #[arg(long, env = "MILLRACE_INSECURE_RPC", help_heading = "Cluster")]
    pub insecure_rpc: bool,

    /// How a frontend knows who connects
    #[arg(long, env = "MILLRACE_AUTH", value_enum, help_heading = "Cluster")]
    pub auth: Option<Auth>,
}

/// Resolved settings of a process of a cluster.
#[derive(Clone, Debug)]
pub struct RoleConfig {
    pub role: Role,
    pub process: Config,
    pub advertise: Option<String>,
    /// Of the leader; empty: this process is it.
    pub meta: String,
    pub insecure_rpc: bool,
    pub auth: Auth,
}

impl ClusterOptions {
    /// Checks what a role needs, and fills in what was not given.
    pub fn resolve(self, role: Role) -> Result<RoleConfig, ConfigError> {
        let ClusterOptions { mut process, advertise, meta, insecure_rpc, auth } = self;
        if process.listen.is_none() {
            process.listen = Some(role.default_listen().to_owned());
        }
        if process.data_dir.is_none() && process.config.is_none() {
            process.data_dir = Some(PathBuf::from("millrace-data").join(role.name()));
        }
        let named_store = process.object_store.is_some() || process.config.is_some();
        if !named_store {
            return Err(ConfigError::Missing {
                name: "--object-store",
                why: "the processes of a cluster share one: file:///path or s3://bucket/prefix",
            });
        }
        let meta = match (role, meta.as_slice()) {
            (Role::Meta, []) => String::new(),
            (Role::Meta, [_, ..]) => {
                return Err(ConfigError::Unsupported {
                    name: "--meta",
                    what: "several meta processes are not supported yet",
                });
            }
            (_, [one]) => one.clone(),
            (_, []) => {
                return Err(ConfigError::Missing {
                    name: "--meta",
                    why: "this process needs to know where the meta process listens",
                });
            }
            (_, [_, _, ..]) => {
                return Err(ConfigError::Unsupported {
                    name: "--meta",
                    what: "several meta processes are not supported yet",
                });
            }
        };
        let process = process.resolve()?;
        Ok(RoleConfig {
            role,
            process,
            advertise,
            meta,
            insecure_rpc,
            auth: auth.unwrap_or_default(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(meta: &[&str]) -> ClusterOptions {
        let process = Options { object_store: Some("file:///tmp/x".into()), ..Options::default() };
        let meta = meta.iter().map(|m| (*m).to_owned()).collect();
        ClusterOptions { process, meta, ..ClusterOptions::default() }
    }

    #[test]
    fn a_role_has_an_address_and_a_directory_of_its_own() {
        let compute = given(&["m:1"]).resolve(Role::Compute).unwrap();
        assert_eq!(
            (compute.process.listen.as_str(), compute.meta.as_str()),
            ("127.0.0.1:4571", "m:1")
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
        let error = given(&["a:1", "b:1"]).resolve(Role::Compute).unwrap_err().to_string();
        assert!(error.contains("not supported"), "{error}");
    }
}
