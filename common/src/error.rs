//! Errors as a user meets them: a primary line in lower case without a full stop, a SQLSTATE, and
//! where possible a detail, a hint and a position (docs/design.md).

use std::fmt;
use std::ops::{Deref, DerefMut};

/// A five-character SQLSTATE code of PostgreSQL's Appendix A.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SqlState(pub &'static str);

impl fmt::Debug for SqlState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

macro_rules! states {
    ($($name:ident = $code:literal),* $(,)?) => {
        impl SqlState { $(pub const $name: SqlState = SqlState($code);)* }
    };
}

states! {
    SUCCESS = "00000",
    CONNECTION_FAILURE = "08006",
    PROTOCOL_VIOLATION = "08P01",
    TRANSACTION_RESOLUTION_UNKNOWN = "08007",
    FEATURE_NOT_SUPPORTED = "0A000",
    CARDINALITY_VIOLATION = "21000",
    DATA_EXCEPTION = "22000",
    STRING_DATA_RIGHT_TRUNCATION = "22001",
    NUMERIC_VALUE_OUT_OF_RANGE = "22003",
    DATETIME_FIELD_OVERFLOW = "22008",
    INVALID_DATETIME_FORMAT = "22007",
    DIVISION_BY_ZERO = "22012",
    INVALID_PARAMETER_VALUE = "22023",
    INVALID_TEXT_REPRESENTATION = "22P02",
    BAD_COPY_FILE_FORMAT = "22P04",
    INVALID_BINARY_REPRESENTATION = "22P03",
    INTEGRITY_CONSTRAINT_VIOLATION = "23000",
    NOT_NULL_VIOLATION = "23502",
    UNIQUE_VIOLATION = "23505",
    CHECK_VIOLATION = "23514",
    ACTIVE_SQL_TRANSACTION = "25001",
    NO_ACTIVE_SQL_TRANSACTION = "25P01",
    IN_FAILED_SQL_TRANSACTION = "25P02",
    INVALID_SQL_STATEMENT_NAME = "26000",
    INVALID_AUTHORIZATION = "28000",
    INVALID_PASSWORD = "28P01",
    DEPENDENT_OBJECTS_STILL_EXIST = "2BP01",
    INVALID_CURSOR_NAME = "34000",
    INVALID_CATALOG_NAME = "3D000",
    INVALID_SAVEPOINT = "3B001",
    INVALID_SCHEMA_NAME = "3F000",
    SERIALIZATION_FAILURE = "40001",
    SYNTAX_ERROR = "42601",
    INSUFFICIENT_PRIVILEGE = "42501",
    UNDEFINED_COLUMN = "42703",
    UNDEFINED_FUNCTION = "42883",
    UNDEFINED_TABLE = "42P01",
    UNDEFINED_PARAMETER = "42P02",
    UNDEFINED_OBJECT = "42704",
    DUPLICATE_COLUMN = "42701",
    DUPLICATE_TABLE = "42P07",
    DUPLICATE_SCHEMA = "42P06",
    DUPLICATE_OBJECT = "42710",
    AMBIGUOUS_COLUMN = "42702",
    DATATYPE_MISMATCH = "42804",
    GROUPING_ERROR = "42803",
    CANNOT_COERCE = "42846",
    WRONG_OBJECT_TYPE = "42809",
    INVALID_TABLE_DEFINITION = "42P16",
    INVALID_OBJECT_DEFINITION = "42P17",
    INDETERMINATE_DATATYPE = "42P18",
    INSUFFICIENT_RESOURCES = "53000",
    DISK_FULL = "53100",
    OUT_OF_MEMORY = "53200",
    TOO_MANY_CONNECTIONS = "53300",
    STATEMENT_TOO_COMPLEX = "54001",
    OBJECT_NOT_IN_PREREQUISITE_STATE = "55000",
    OBJECT_IN_USE = "55006",
    LOCK_NOT_AVAILABLE = "55P03",
    QUERY_CANCELED = "57014",
    ADMIN_SHUTDOWN = "57P01",
    CANNOT_CONNECT_NOW = "57P03",
    SYSTEM_ERROR = "58000",
    IO_ERROR = "58030",
    SNAPSHOT_TOO_OLD = "72000",
    INTERNAL_ERROR = "XX000",
    DATA_CORRUPTED = "XX001",
}

/// An error that a client sees. Other crates' typed errors convert into it where they reach a session.
///
/// One pointer wide, because functions return it for each row; its parts are read and written through [`Deref`].
#[derive(Clone, Debug, thiserror::Error)]
#[error("{}", .0.message)]
pub struct SqlError(Box<ErrorParts>);

/// The parts of a [`SqlError`].
#[derive(Clone, Debug)]
pub struct ErrorParts {
    pub state: SqlState,
    /// Primary line: lower case, no full stop.
    pub message: String,
    /// A sentence with the particulars.
    pub detail: Option<String>,
    /// A sentence saying what to do.
    pub hint: Option<String>,
    /// 1-based character offset into the statement.
    pub position: Option<u32>,
    /// Line and column, counted from 1, after which what the error is about stands: where `position` is still to be
    /// found.
    pub after: Option<(u64, u64)>,
    /// COPY's "CONTEXT" line and the like.
    pub context: Option<String>,
    /// The table, column or constraint that the error is about, for programs to read.
    pub object: Option<ErrorObject>,
    /// Which of a statement's rows it is about, counted from 0, for who knows where that row came from.
    pub row: Option<u64>,
    /// PostgreSQL's name of the function that reports the error, where drivers decide by it.
    pub routine: Option<&'static str>,
}

/// Names of what an error is about. As in PostgreSQL, errors of class 23 have one and others do not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ErrorObject {
    pub schema: String,
    pub table: String,
    pub column: Option<String>,
    pub constraint: Option<String>,
}

impl Deref for SqlError {
    type Target = ErrorParts;

    fn deref(&self) -> &ErrorParts {
        &self.0
    }
}

impl DerefMut for SqlError {
    fn deref_mut(&mut self) -> &mut ErrorParts {
        &mut self.0
    }
}

impl SqlError {
    pub fn new(state: SqlState, message: impl Into<String>) -> SqlError {
        SqlError(Box::new(ErrorParts {
            state,
            message: message.into(),
            detail: None,
            hint: None,
            position: None,
            after: None,
            context: None,
            object: None,
            row: None,
            routine: None,
        }))
    }

    pub fn into_parts(self) -> ErrorParts {
        *self.0
    }

    /// Something Millrace does not do; `feature` is named in the message (SQLSTATE 0A000).
    pub fn unsupported(feature: impl fmt::Display) -> SqlError {
        SqlError::new(SqlState::FEATURE_NOT_SUPPORTED, format!("{feature} is not supported"))
    }

    /// A broken invariant: a bug of ours, not the user's doing.
    pub fn internal(message: impl Into<String>) -> SqlError {
        SqlError::new(SqlState::INTERNAL_ERROR, message)
            .with_hint("This is a bug in Millrace; please report it with the server's log.")
    }

    pub fn with_detail(mut self, detail: impl Into<String>) -> SqlError {
        self.detail = Some(detail.into());
        self
    }

    pub fn with_hint(mut self, hint: impl Into<String>) -> SqlError {
        self.hint = Some(hint.into());
        self
    }

    pub fn with_position(mut self, position: u32) -> SqlError {
        self.position = Some(position);
        self
    }

    pub fn with_object(mut self, object: ErrorObject) -> SqlError {
        self.object = Some(object);
        self
    }

    pub fn with_routine(mut self, routine: &'static str) -> SqlError {
        self.routine = Some(routine);
        self
    }

    pub fn with_context(mut self, context: impl Into<String>) -> SqlError {
        self.context = Some(context.into());
        self
    }
}
