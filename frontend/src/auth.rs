//! Who may come in: SCRAM-SHA-256 passwords, and TLS from files.
//!
//! Passwords are kept as PostgreSQL keeps them, as verifiers: `SCRAM-SHA-256$iterations:salt$stored:server`.
//! The exchange is the library's; what goes over the wire never tells the password, nor whether a user
//! exists.
//!
//! Sources: RFC 5802, RFC 7677; PostgreSQL 15 documentation, 55.3.

use std::sync::{Arc, OnceLock};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use millrace_common::{SqlError, SqlState};
use pgwire::api::auth::sasl::scram::{
    SCRAM_ITERATIONS, ScramSecret, ScramServerAuth, gen_salted_password,
};
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

const SCHEME: &str = "SCRAM-SHA-256";
/// Bytes of a salt, as PostgreSQL's.
const SALT: usize = 16;

/// Why TLS cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("no certificate could be read: {0}")]
    Certificate(String),
    #[error("no private key could be read: {0}")]
    Key(String),
    #[error("the certificate and the key cannot be used: {0}")]
    Pair(#[source] tokio_rustls::rustls::Error),
}

/// Encrypted connections.
#[derive(Clone, Debug)]
pub struct Tls {
    pub config: Arc<ServerConfig>,
    /// The SCRAM exchange bound to the certificate, where its kind allows that.
    scram: ScramServerAuth,
}

impl Tls {
    /// From a certificate chain and its key, both PEM.
    pub fn from_pem(chain: &[u8], key: &[u8]) -> Result<Tls, TlsError> {
        let certificates: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(chain)
            .collect::<Result<_, _>>()
            .map_err(|e| TlsError::Certificate(e.to_string()))?;
        if certificates.is_empty() {
            return Err(TlsError::Certificate("the file has none".to_owned()));
        }
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|e| TlsError::Key(e.to_string()))?;
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(TlsError::Pair)?
            .with_no_client_auth()
            .with_single_cert(certificates, key)
            .map_err(TlsError::Pair)?;
        let mut scram = ScramServerAuth::new();
        if let Err(e) = scram.configure_certificate(chain) {
            tracing::warn!(error = %e, "passwords are not bound to this kind of certificate");
        }
        Ok(Tls { config: Arc::new(config), scram })
    }
}

/// The exchange for a connection, and the mechanisms it offers.
pub fn scram(tls: Option<&Tls>) -> (ScramServerAuth, Vec<String>) {
    let scram = tls.map_or_else(ScramServerAuth::new, |t| t.scram.clone());
    let mut names = vec![SCHEME.to_owned()];
    if scram.supports_channel_binding() {
        names.insert(0, format!("{SCHEME}-PLUS"));
    }
    (scram, names)
}

/// The verifier to keep for a password; one that is a verifier already is kept as it is.
pub fn verifier_of(password: &str) -> Result<String, SqlError> {
    if password.starts_with(SCHEME) {
        return match parse(password) {
            Some(_) => Ok(password.to_owned()),
            None => Err(SqlError::new(
                SqlState::INVALID_PARAMETER_VALUE,
                "the password begins like a SCRAM verifier but is not one",
            )),
        };
    }
    let salt: [u8; SALT] = rand::random();
    let salted = gen_salted_password(password, &salt, SCRAM_ITERATIONS);
    let secret =
        ScramSecret::verifier_from_salted_password(salt.to_vec(), salted, SCRAM_ITERATIONS);
    let ScramSecret::Verifier { salt, iterations, stored_key, server_key } = secret else {
        return Err(SqlError::internal("no verifier was made"));
    };
    let (salt, stored, server) =
        (STANDARD.encode(salt), STANDARD.encode(stored_key), STANDARD.encode(server_key));
    Ok(format!("{SCHEME}${iterations}:{salt}${stored}:{server}"))
}

/// What nobody outside this database knows, and what stays the same as long as there is the database.
/// Clones share it: where nobody leads yet it may become known later.
#[derive(Clone, Default)]
pub struct OwnSecret(Arc<OnceLock<String>>);

impl OwnSecret {
    pub fn new(text: String) -> OwnSecret {
        OwnSecret(Arc::new(OnceLock::from(text)))
    }

    /// It has become known. The first one stays.
    pub fn learn(&self, text: String) {
        let _ = self.0.set(text);
    }

    fn text(&self) -> &str {
        self.0.get().map(String::as_str).unwrap_or_default()
    }

    /// Whether there is one.
    pub(crate) fn is_known(&self) -> bool {
        !self.text().is_empty()
    }

    /// What only those can tell of a message that know the secret.
    pub(crate) fn proof_of(&self, message: &[u8]) -> Vec<u8> {
        // One round of PBKDF2 is one of HMAC.
        gen_salted_password(self.text(), message, 1)
    }

    /// The salt of a user that has no password, which is the same in every attempt, as with others.
    fn salt_of(&self, user: &str) -> Vec<u8> {
        let mut salt = self.proof_of(user.as_bytes());
        salt.truncate(SALT);
        salt
    }
}

impl std::fmt::Debug for OwnSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("OwnSecret(…)")
    }
}

/// The same as [`secret_of`] for a client that sees the salt: it must not tell whether the user has a password.
pub fn challenge_of(user: &str, verifier: Option<&str>, own: &OwnSecret) -> ScramSecret {
    let invented = own.salt_of(user);
    let mut secret = secret_of(verifier);
    if let ScramSecret::Verifier { salt, .. } = &mut secret
        && verifier.and_then(parse).is_none()
    {
        *salt = invented;
    }
    secret
}

/// What a client has to prove that it knows. For users without a password it is nothing anybody knows,
/// and looks like the rest.
pub fn secret_of(verifier: Option<&str>) -> ScramSecret {
    verifier.and_then(parse).unwrap_or_else(|| ScramSecret::Verifier {
        salt: rand::random::<[u8; SALT]>().to_vec(),
        iterations: SCRAM_ITERATIONS,
        stored_key: rand::random::<[u8; 32]>().to_vec(),
        server_key: rand::random::<[u8; 32]>().to_vec(),
    })
}

/// Whether this is the password of a verifier. A user without one costs as much time as one with it.
pub fn is_password(verifier: Option<&str>, password: &str) -> bool {
    let known = verifier.and_then(parse).is_some();
    let secret = secret_of(verifier);
    let ScramSecret::Verifier { salt, iterations, stored_key: kept, .. } = secret else {
        return false;
    };
    let salted = gen_salted_password(password, &salt, iterations);
    let given = ScramSecret::verifier_from_salted_password(salt, salted, iterations);
    let ScramSecret::Verifier { stored_key: given, .. } = given else { return false };
    is_same(&kept, &given) & known
}

/// Compares secrets in a time that depends on their length alone.
pub fn is_same(a: &[u8], b: &[u8]) -> bool {
    let differing = a.iter().zip(b).fold(0, |d, (a, b)| std::hint::black_box(d | (a ^ b)));
    a.len() == b.len() && differing == 0
}

fn parse(verifier: &str) -> Option<ScramSecret> {
    let mut parts = verifier.split('$');
    let (scheme, salted, keys) = (parts.next()?, parts.next()?, parts.next()?);
    let (iterations, salt) = salted.split_once(':')?;
    let (stored, server) = keys.split_once(':')?;
    let iterations = iterations.parse().ok().filter(|n: &usize| (1..=1 << 24).contains(n))?;
    let key = |text: &str| STANDARD.decode(text).ok().filter(|k| k.len() == 32);
    let whole = scheme == SCHEME && parts.next().is_none();
    whole.then_some(ScramSecret::Verifier {
        salt: STANDARD.decode(salt).ok()?,
        iterations,
        stored_key: key(stored)?,
        server_key: key(server)?,
    })
}

pub fn wrong_password(user: &str) -> SqlError {
    let message = format!("password authentication failed for user \"{user}\"");
    SqlError::new(SqlState::INVALID_PASSWORD, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_salt_does_not_tell_whether_there_is_a_user() {
        let salt = |own: &OwnSecret, user: &str, verifier: Option<&str>| {
            let ScramSecret::Verifier { salt, iterations, .. } = challenge_of(user, verifier, own)
            else {
                panic!("no verifier")
            };
            assert_eq!((salt.len(), iterations), (SALT, SCRAM_ITERATIONS));
            salt
        };
        let own = OwnSecret::new("a".to_owned());
        let eve = salt(&own, "eve", None);
        assert_eq!(eve, salt(&own, "eve", None));
        assert_ne!(eve, salt(&own, "eva", None));
        assert_ne!(eve, salt(&OwnSecret::new("b".to_owned()), "eve", None));
        let verifier = verifier_of("pencil").unwrap();
        let kept = salt(&own, "eve", Some(&verifier));
        assert!(verifier.contains(&STANDARD.encode(kept)));
    }

    #[test]
    fn verifiers_have_postgresqls_form() {
        let verifier = verifier_of("pencil").unwrap();
        assert!(parse(&verifier).is_some() && verifier.starts_with("SCRAM-SHA-256$4096:"));
        assert_ne!(verifier, verifier_of("pencil").unwrap(), "salted");
        assert_eq!(verifier_of(&verifier).unwrap(), verifier);
        assert!(verifier_of("SCRAM-SHA-256$x").is_err());
    }

    #[test]
    fn a_password_is_checked_against_its_verifier() {
        // Made by PostgreSQL 15.
        let foreign = "SCRAM-SHA-256$4096:qOFAKNnyGyMdTnlEAJkDbA==$\
            lDdST2Y6O9h8bSVf9gzlFVS277E00jsABizzFAgj6ss=:hsoyfNHXYr3EAI68Vf2IuWidatkqNaETlkm2pweVJqU=";
        assert!(is_password(Some(foreign), "pencil"));
        assert!(!is_password(Some(foreign), "Pencil") && !is_password(Some(foreign), ""));
        let own = verifier_of("pencil").unwrap();
        assert!(is_password(Some(&own), "pencil") && !is_password(Some(&own), &own));
        assert!(!is_password(None, "") && !is_password(Some("rubbish"), "rubbish"));
        assert!(is_same(b"ab", b"ab") && !is_same(b"ab", b"ac") && !is_same(b"ab", b"abc"));
    }
}
