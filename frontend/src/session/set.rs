//! SET, RESET, DISCARD, SHOW of settings.

use millrace_common::settings::{SETTINGS, Setting};
use millrace_common::{SqlError, SqlState};
use sqlparser::ast::{ContextModifier, Expr, Set, TransactionAccessMode, TransactionMode, Value};

use super::{Block, RowSet, Session};

impl Session {
    pub fn set(&mut self, set: &Set) -> Result<(), SqlError> {
        match set {
            Set::SingleAssignment { scope, variable, values, .. } => {
                let name = variable.to_string().replace('"', "");
                if matches!(scope, Some(ContextModifier::Local)) && !self.in_block() {
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
                let parts = values.iter().map(value_text).collect::<Result<Vec<_>, _>>()?;
                self.set_value(&name, &parts.join(", "))
            }
            Set::SetTimeZone { value, .. } => {
                let zone = value_text(value)?;
                if zone.eq_ignore_ascii_case("default") || zone.eq_ignore_ascii_case("local") {
                    return self.reset("TimeZone");
                }
                self.set_value("TimeZone", &zone)
            }
            Set::SetNames { charset_name, .. } => {
                self.set_value("client_encoding", &charset_name.to_string())
            }
            Set::SetNamesDefault {} => self.reset("client_encoding"),
            Set::SetTransaction { modes, session, .. } => self.set_transaction(modes, *session),
            Set::SetRole { role_name, .. } => match role_name {
                None => Ok(()),
                Some(role) if role.value == self.user => Ok(()),
                Some(_) => Err(SqlError::unsupported("SET ROLE to another user")),
            },
            Set::SetSessionAuthorization(_) => {
                Err(SqlError::unsupported("SET SESSION AUTHORIZATION"))
            }
            other => Err(SqlError::unsupported(format!("{other}"))),
        }
    }

    fn set_transaction(
        &mut self,
        modes: &[TransactionMode],
        session: bool,
    ) -> Result<(), SqlError> {
        if !session {
            if !self.in_block() {
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
            if !local || self.in_block() {
                self.keep_for_block(name, *local)?;
                self.set_value(name, value)?;
                shown.push(Some(self.settings.get(name)?.to_owned()));
            } else {
                // It would last to the end of this statement, which nothing can see.
                self.settings.clone().set(name, value)?;
                shown.push(Some(value.clone()));
            }
        }
        RowSet::text(&vec!["set_config"; settings.len()], vec![shown], "SELECT {n}")
    }

    /// Before a setting changes in a block: what SET LOCAL has to bring back.
    fn keep_for_block(&mut self, name: &str, local: bool) -> Result<(), SqlError> {
        if self.in_block() {
            // A plain SET in the same block lasts longer than a SET LOCAL before it.
            self.locals.retain(|(n, _)| !n.eq_ignore_ascii_case(name));
            if local {
                let before = self.settings.get(name)?.to_owned();
                self.locals.push((name.to_owned(), before));
            }
        }
        Ok(())
    }

    pub fn set_value(&mut self, name: &str, value: &str) -> Result<(), SqlError> {
        let setting = self.settings.set(name, value)?;
        self.note_change(setting);
        Ok(())
    }

    pub fn reset(&mut self, name: &str) -> Result<(), SqlError> {
        let setting = self.settings.reset(name)?;
        self.note_change(setting);
        Ok(())
    }

    /// Ends what SET LOCAL set.
    pub fn end_locals(&mut self) {
        for (name, before) in std::mem::take(&mut self.locals) {
            // The value was this setting's before, so it is one it takes.
            if let Ok(setting) = self.settings.set(&name, &before) {
                self.note_change(setting);
            }
        }
    }

    pub fn reset_all(&mut self) {
        self.settings.reset_all();
        SETTINGS.iter().for_each(|s| self.note_change(s));
    }

    fn note_change(&mut self, setting: &'static Setting) {
        if setting.report && !self.changed.contains(&setting.name) {
            self.changed.push(setting.name);
        }
    }

    pub fn show(&self, name: &str) -> Result<RowSet, SqlError> {
        let setting = millrace_common::settings::find(name)?;
        RowSet::text(&[setting.name], vec![vec![Some(self.shown(setting))]], "SHOW")
    }

    /// A setting's value here, as people read it.
    fn shown(&self, setting: &'static Setting) -> String {
        let kept = match self.settings.is_set(setting) {
            true => None,
            false => self.cluster().setting(setting.name),
        };
        setting.show(kept.as_deref().unwrap_or_else(|| self.settings.value(setting)))
    }

    pub fn show_all(&self) -> Result<RowSet, SqlError> {
        let rows = SETTINGS
            .iter()
            .map(|s| vec![Some(s.name.to_owned()), Some(self.shown(s)), Some(s.doc.to_owned())])
            .collect();
        RowSet::text(&["name", "setting", "description"], rows, "SHOW")
    }

    /// DISCARD ALL: the session as it was when it began.
    pub fn discard_all(&mut self) -> Result<(), SqlError> {
        if self.in_block() {
            return Err(SqlError::new(
                SqlState::ACTIVE_SQL_TRANSACTION,
                "DISCARD ALL cannot run inside a transaction block",
            ));
        }
        self.portals.clear();
        self.prepared.clear();
        self.block = Block::None;
        self.reset_all();
        Ok(())
    }
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
