//! SET, RESET, DISCARD, SHOW of settings.

use millrace_common::encoding::interval::parse_interval;
use millrace_common::settings::{Kind, SETTINGS, Setting, find};
use millrace_common::zone::Zone;
use millrace_common::{SqlError, SqlState};
use sqlparser::ast::{
    ContextModifier, Expr, Interval, Set, SetSessionAuthorizationParamKind, TransactionAccessMode,
    TransactionMode, Value,
};

use super::settings::{is_custom, no_effect};
use super::{Block, RowSet, Session, Settings};

impl Session {
    pub fn set(&mut self, set: &Set) -> Result<(), SqlError> {
        match set {
            Set::SingleAssignment { scope, variable, values, .. } => {
                let name = variable.to_string().replace('"', "");
                if matches!(scope, Some(ContextModifier::Local)) && !self.in_transaction() {
                    self.notice(
                        "WARNING",
                        SqlState::NO_ACTIVE_SQL_TRANSACTION,
                        "SET LOCAL can only be used in transaction blocks",
                    );
                    return Ok(());
                }
                self.keep_for_block(&name, matches!(scope, Some(ContextModifier::Local)))?;
                if let [Expr::Identifier(i)] = values.as_slice()
                    && i.quote_style.is_none()
                    && i.value.eq_ignore_ascii_case("default")
                {
                    return self.reset(&name);
                }
                if let [Expr::Interval(offset)] = values.as_slice()
                    && find(&name).is_ok_and(|setting| setting.kind == Kind::Zone)
                {
                    return self.set_value(&name, &offset_of(offset)?);
                }
                let parts = values.iter().map(value_text).collect::<Result<Vec<_>, _>>()?;
                let value = parts.join(", ");
                if self.is_met(&name, &value) {
                    return Ok(());
                }
                self.set_value(&name, &value)
            }
            Set::SetTimeZone { local, value } => {
                if *local && !self.in_transaction() {
                    self.notice(
                        "WARNING",
                        SqlState::NO_ACTIVE_SQL_TRANSACTION,
                        "SET LOCAL can only be used in transaction blocks",
                    );
                    return Ok(());
                }
                self.keep_for_block("TimeZone", *local)?;
                let zone = match value {
                    Expr::Interval(offset) => offset_of(offset)?,
                    value => value_text(value)?,
                };
                if zone.eq_ignore_ascii_case("default") || zone.eq_ignore_ascii_case("local") {
                    return self.reset("TimeZone");
                }
                self.set_value("TimeZone", &zone)
            }
            Set::SetNames { charset_name, .. } => {
                self.set_value("client_encoding", &charset_name.value)
            }
            Set::SetNamesDefault {} => self.reset("client_encoding"),
            Set::SetTransaction { modes, session, .. } => self.set_transaction(modes, *session),
            Set::SetRole { role_name, .. } => match role_name {
                None => Ok(()),
                Some(role) if role.value == self.user => Ok(()),
                Some(_) => Err(SqlError::unsupported("SET ROLE to another user")),
            },
            Set::SetSessionAuthorization(param) => match &param.kind {
                SetSessionAuthorizationParamKind::Default => Ok(()),
                SetSessionAuthorizationParamKind::User(user) if user.value == self.user => Ok(()),
                SetSessionAuthorizationParamKind::User(_) => {
                    Err(SqlError::unsupported("SET SESSION AUTHORIZATION to another user"))
                }
            },
            other => Err(SqlError::unsupported(format!("{other}"))),
        }
    }

    /// Tells the client of a setting that does nothing here. Whether the value asks for what holds anyway.
    fn is_met(&mut self, name: &str, value: &str) -> bool {
        let isolation = ["transaction_isolation", "default_transaction_isolation"];
        let strict = value.eq_ignore_ascii_case("strict serializable")
            && isolation.iter().any(|known| known.eq_ignore_ascii_case(name));
        let why = match strict {
            true => Some("Single statements are strictly serializable in any case."),
            false => no_effect(name),
        };
        if let Some(why) = why {
            let message = format!("the setting \"{name}\" has no effect");
            let notice = SqlError::new(SqlState::SUCCESS, message).with_detail(why);
            self.notices.push(("NOTICE", notice));
        }
        strict
    }

    fn set_transaction(
        &mut self,
        modes: &[TransactionMode],
        session: bool,
    ) -> Result<(), SqlError> {
        if !session {
            if !self.in_transaction() {
                self.notice(
                    "WARNING",
                    SqlState::NO_ACTIVE_SQL_TRANSACTION,
                    "SET TRANSACTION can only be used in transaction blocks",
                );
                return Ok(());
            }
            return self.set_modes(modes);
        }
        for mode in modes {
            match mode {
                TransactionMode::IsolationLevel(level) => self.set_value(
                    "default_transaction_isolation",
                    &level.to_string().to_lowercase(),
                )?,
                TransactionMode::AccessMode(access) => {
                    let read_only = matches!(access, TransactionAccessMode::ReadOnly);
                    let value = if read_only { "on" } else { "off" };
                    self.set_value("default_transaction_read_only", value)?;
                }
            }
        }
        Ok(())
    }

    /// The function set_config: as SET or SET LOCAL, and returns the new values.
    pub fn set_configs(
        &mut self,
        settings: Vec<(String, String, bool)>,
    ) -> Result<RowSet, SqlError> {
        let mut shown = Vec::with_capacity(settings.len());
        for (name, value, local) in &settings {
            if !local || self.in_transaction() {
                self.keep_for_block(name, *local)?;
                self.set_value(name, value)?;
                shown.push(Some(self.settings.shown(name)?));
            } else {
                // It would last to the end of this statement, which nothing can see.
                let mut settings = self.settings.clone();
                settings.set(name, value)?;
                shown.push(Some(settings.shown(name)?));
            }
        }
        RowSet::text(&vec!["set_config"; settings.len()], vec![shown], "SELECT {n}")
    }

    /// Before a setting changes in a block: what SET LOCAL has to bring back.
    fn keep_for_block(&mut self, name: &str, local: bool) -> Result<(), SqlError> {
        if self.in_transaction() {
            let hidden = self.locals.iter().position(|(n, _)| n.eq_ignore_ascii_case(name));
            // A plain SET in the same block lasts longer than a SET LOCAL before it.
            if let Some(at) = hidden
                && !local
            {
                self.locals.remove(at);
            }
            // What the first SET LOCAL has hidden is what comes back.
            if local && hidden.is_none() {
                let before = match self.settings.get(name) {
                    Ok(before) => before.to_owned(),
                    // As in PostgreSQL: what had no value has an empty one afterwards.
                    Err(_) if is_custom(name) => String::new(),
                    Err(e) => return Err(e),
                };
                self.locals.push((name.to_owned(), before));
            }
        }
        Ok(())
    }

    pub fn set_value(&mut self, name: &str, value: &str) -> Result<(), SqlError> {
        let setting = self.settings.set(name, value)?;
        setting.into_iter().for_each(|s| self.note_change(s));
        Ok(())
    }

    pub fn reset(&mut self, name: &str) -> Result<(), SqlError> {
        let setting = self.settings.reset(name)?;
        setting.into_iter().for_each(|s| self.note_change(s));
        Ok(())
    }

    /// After a string of statements that is no part of a block, or its failure.
    pub fn end_string(&mut self) {
        if !self.in_block() {
            self.end_locals();
        }
    }

    /// Ends what SET LOCAL set.
    pub fn end_locals(&mut self) {
        for (name, before) in std::mem::take(&mut self.locals) {
            // The value was this setting's before, so it is one it takes.
            if let Ok(Some(setting)) = self.settings.set(&name, &before) {
                self.note_change(setting);
            }
        }
    }

    pub fn reset_all(&mut self) {
        self.settings.reset_all();
        SETTINGS.iter().for_each(|s| self.note_change(s));
    }

    /// The settings as they were before what is rolled back; the client is told.
    pub(super) fn restore(&mut self, settings: Settings) {
        for setting in SETTINGS.iter().filter(|s| s.report) {
            if self.settings.value(setting) != settings.value(setting) {
                self.note_change(setting);
            }
        }
        self.settings = settings;
    }

    fn note_change(&mut self, setting: &'static Setting) {
        if setting.report && !self.changed.contains(&setting.name) {
            self.changed.push(setting.name);
        }
    }

    pub fn show(&self, name: &str) -> Result<RowSet, SqlError> {
        let (name, value) = match is_custom(name) {
            true => (name, self.settings.get(name)?.to_owned()),
            false => {
                let setting = millrace_common::settings::find(name)
                    .map_err(|e| crate::unsupported::list_of_elsewhere(name).unwrap_or(e))?;
                (setting.name, self.printed(setting))
            }
        };
        RowSet::text(&[name], vec![vec![Some(value)]], "SHOW")
    }

    /// A setting's value here, as people read it.
    fn printed(&self, setting: &'static Setting) -> String {
        let kept = match self.settings.is_set(setting) {
            true => None,
            false => self.cluster().setting(setting.name),
        };
        setting.show(kept.as_deref().unwrap_or_else(|| self.settings.value(setting)))
    }

    pub fn show_all(&self) -> Result<RowSet, SqlError> {
        let rows = SETTINGS
            .iter()
            .map(|s| vec![Some(s.name.to_owned()), Some(self.printed(s)), Some(s.doc.to_owned())])
            .collect();
        RowSet::text(&["name", "setting", "description"], rows, "SHOW")
    }

    /// DISCARD ALL: the session as it was when it began.
    pub fn discard_all(&mut self) -> Result<(), SqlError> {
        // Nor among the statements of one string: what they have written would neither be committed nor forgotten.
        if !matches!(self.block, Block::None) {
            return Err(SqlError::new(
                SqlState::ACTIVE_SQL_TRANSACTION,
                "DISCARD ALL cannot run inside a transaction block",
            ));
        }
        self.portals.clear();
        self.feeds.clear();
        self.prepared.clear();
        self.shared.locks.release_session(self.pid);
        self.reset_all();
        Ok(())
    }
}

/// The zone of an interval, which is its offset to the east.
fn offset_of(interval: &Interval) -> Result<String, SqlError> {
    let text = value_text(&interval.value)?;
    // A number counts the unit behind it.
    let text = match (&interval.leading_field, text.trim().parse::<f64>()) {
        (Some(unit), Ok(_)) => format!("{text} {unit}"),
        _ => text,
    };
    let offset = parse_interval(&text)?;
    let wrong = |detail: &str| {
        let message = format!("invalid value for parameter \"TimeZone\": \"INTERVAL '{text}'\"");
        SqlError::new(SqlState::INVALID_PARAMETER_VALUE, message).with_detail(detail)
    };
    if offset.months != 0 {
        return Err(wrong("Cannot specify months in time zone interval."));
    }
    if offset.days != 0 {
        return Err(wrong("Cannot specify days in time zone interval."));
    }
    Ok(Zone::Fixed(offset.us).name())
}

/// A value in SET as text: a name, a string, a number.
fn value_text(e: &Expr) -> Result<String, SqlError> {
    Ok(match e {
        Expr::Identifier(i) => i.value.clone(),
        Expr::Value(v) => match &v.value {
            Value::SingleQuotedString(s)
            | Value::DoubleQuotedString(s)
            | Value::EscapedStringLiteral(s) => s.clone(),
            other => other.to_string(),
        },
        Expr::Interval(i) => return value_text(&i.value),
        other => other.to_string(),
    })
}
