use super::*;

#[test]
fn every_default_is_a_value_of_its_setting() {
    for s in SETTINGS.iter().filter(|s| s.kind != Kind::ReadOnly) {
        assert!(s.check(s.default).is_ok(), "{}", s.name);
        assert!(s.doc.ends_with('.'), "{}", s.name);
    }
    assert!(SETTINGS.is_sorted_by_key(|s| s.name.to_ascii_lowercase()));
}

#[test]
fn values_are_checked_and_reset() {
    let mut s = SessionSettings::default();
    s.set("statement_timeout", "2s").unwrap();
    assert_eq!(s.millis("STATEMENT_TIMEOUT"), Some(2000));
    s.reset("statement_timeout").unwrap();
    assert_eq!(s.millis("statement_timeout"), None);
    assert_eq!(s.set("nonsense", "1").unwrap_err().state.0, "42704");
    assert_eq!(s.set("server_version", "16").unwrap_err().state.0, "55P02");
    assert_eq!(s.set("timezone", "Mars").unwrap_err().state.0, "22023");
    assert!(s.set("timezone", "200").unwrap_err().detail.is_some());
    s.set("timezone", "etc/utc").unwrap();
    assert_eq!((s.get("TIME ZONE").unwrap(), s.zone()), ("Etc/UTC", None));
    s.set("timezone", "-3.5").unwrap();
    assert_eq!(s.zone(), Some(Zone::Fixed(-12_600_000_000)));
    assert_eq!(s.set("barrier_interval", "1s").unwrap_err().state.0, "55P02");
    assert_eq!(find("barrier_interval").unwrap().check("250000us").unwrap(), "250");
    assert_eq!(find("statement_timeout").unwrap().show("90000"), "90s");
    assert_eq!(find("statement_timeout").unwrap().show("0"), "0");
    s.set("background_ddl", "TRUE").unwrap();
    assert!(s.bool("background_ddl"));
}
