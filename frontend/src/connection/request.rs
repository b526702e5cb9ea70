//! Statements as requests: what a statement causes in other processes is logged there with its id, and so is what this
//! process logs of it.

use millrace_common::{SqlError, SqlState};
use millrace_rpc::request::RequestId;
use tracing::Instrument;

use super::Failure;

/// Runs a statement as a request of this process. An error that is not the statement's own is logged, and tells the client
/// the id by which the logs can be searched.
pub(super) async fn as_request<T>(
    incarnation: u64,
    statement: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let told = within_request(incarnation, statement, |result| match result {
        Err(Failure::Sql(error)) => Some(error),
        Ok(_) | Err(Failure::Io(_)) => None,
    });
    told.await
}

/// The same of a statement that comes without a connection.
pub(crate) async fn as_own_request<T>(
    incarnation: u64,
    statement: impl Future<Output = Result<T, SqlError>>,
) -> Result<T, SqlError> {
    within_request(incarnation, statement, |result| result.as_mut().err()).await
}

async fn within_request<R>(
    incarnation: u64,
    statement: impl Future<Output = R>,
    error_of: impl FnOnce(&mut R) -> Option<&mut SqlError>,
) -> R {
    let id = RequestId::next(incarnation);
    let span = tracing::info_span!("statement", request = id.as_str());
    let named = id.clone();
    let statement = async move {
        let mut result = statement.await;
        if let Some(error) = error_of(&mut result).filter(|error| is_internal(error.state)) {
            tracing::warn!(%error, "a statement failed by no fault of its own");
            error.context.get_or_insert_with(|| format!("request {named}"));
        }
        result
    };
    id.scope(statement.instrument(span)).await
}

/// Whether an operator may want to look into it.
fn is_internal(state: SqlState) -> bool {
    state == SqlState::INTERNAL_ERROR || state == SqlState::CONNECTION_FAILURE
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_internal_error_names_its_request_and_others_do_not() {
        let fails = |error: SqlError| async {
            let error = as_request(7, async { Err::<(), _>(Failure::Sql(error)) }).await;
            let Err(Failure::Sql(error)) = error else { panic!("it succeeded") };
            error.context.clone()
        };
        let context = fails(SqlError::internal("x")).await;
        assert!(context.as_ref().is_some_and(|c| c.starts_with("request 7-")), "{context:?}");
        let own = SqlError::new(SqlState::UNDEFINED_TABLE, "x");
        assert_eq!(fails(own).await, None);
        let console = as_own_request(7, async { Err::<(), _>(SqlError::internal("x")) }).await;
        let context = console.unwrap_err().context.clone();
        assert!(context.as_ref().is_some_and(|c| c.starts_with("request 7-")), "{context:?}");
    }
}
