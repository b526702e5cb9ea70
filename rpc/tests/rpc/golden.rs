//! Bytes of messages between processes: a failure means that processes of two builds would not understand each other,
//! so the protocol version has to rise. The bytes are written by hand from the protobuf encoding.

use millrace_rpc::log::{SetSetting, SourceSplit, SplitOffset};
use millrace_rpc::proto;
use millrace_rpc::version::{RunMeta, StatementId};
use prost::Message;

fn hex(message: &impl Message) -> String {
    message.encode_to_vec().iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn golden_requests_of_each_service() {
    let start = proto::StartJobRequest { generation: 3, record: 300, parallelism: 4, job: 7 };
    assert_eq!(hex(&start), "1003".to_owned() + "20ac02" + "3804" + "4007");

    let cut = proto::CutRequest { job: 7, generation: 3, epoch: 300, number: 5, record: 6 };
    assert_eq!(hex(&cut), "08071003".to_owned() + "18ac02" + "2005" + "2806");

    let at = |split, offset| SplitOffset { split, offset };
    let poll = proto::PollSourceRequest {
        source: 7,
        reader: 8,
        record: 300,
        offsets: vec![at(0, 5), at(1, 300)],
        started_ms: 2,
        now_ms: 3,
    };
    let expected = ["0807", "1008", "18ac02", "22021005", "2205080110ac02", "2802", "3003"];
    assert_eq!(hex(&poll), expected.concat());
    let more = Some(proto::poll_source_answer::More::AfterNs(300));
    let answer = proto::PollSourceAnswer {
        splits: vec![SourceSplit { split: 1, name: "p".into(), start: 5 }],
        available: vec![at(1, 300)],
        offsets_per_row: 2,
        more,
        ..proto::PollSourceAnswer::default()
    };
    let expected = ["0a07", "0801", "120170", "1805", "1a05080110ac02", "30ac02", "4002"];
    assert_eq!(hex(&answer), expected.concat());

    let kind = proto::live_part::Kind::Run(proto::RunPart { run_id: 4, meta_length: 2 });
    let part =
        proto::LivePart { job: 7, object: "o".into(), offset: 300, length: 5, kind: Some(kind) };
    let copy = proto::CopyPartsRequest { parts: vec![part] };
    assert_eq!(
        hex(&copy),
        "0a10".to_owned() + "0807" + "12016f" + "18ac02" + "2005" + "2a0408041002"
    );

    let task = proto::CompactionTask {
        task_id: 1,
        job: 7,
        relation: None,
        inputs: vec![RunMeta { run_id: 4, ..RunMeta::default() }],
        target_level: 2,
        horizon: 300,
        bottom: true,
        table: Some(proto::MergedTable { position: Some(0), bound: Some(-1) }),
    };
    let expected = ["0801", "1007", "22020804", "2802", "30ac02", "3801", "4204", "0800", "1001"];
    assert_eq!(hex(&task), expected.concat());

    let read = proto::ReadEpochRequest { relations: vec![7, 300], timeout_ms: 10, fresh: true };
    assert_eq!(hex(&read), "0a0307ac02".to_owned() + "100a" + "1801");
    let read = proto::ReadEpochAnswer { epoch: 300, record: 20, catalog_version: 12 };
    assert_eq!(hex(&read), "08ac02".to_owned() + "1014" + "180c");

    let set = SetSetting { name: "n".into(), value: Some("v".into()) };
    let define = proto::DefineRequest {
        id: Some(StatementId { frontend: 2, number: 300 }),
        since: 5,
        change: Some(proto::define_request::Change::SetSetting(set)),
    };
    assert_eq!(hex(&define), "0a05".to_owned() + "080210ac02" + "1005" + "4a06" + "0a016e120176");
    let defined = proto::DefineAnswer { relation: Some(7), record: 300 };
    assert_eq!(hex(&defined), "0807".to_owned() + "10ac02");

    let kind = Some(proto::dml_kind::Kind::Upsert(proto::Empty {}));
    let statement = proto::DmlStatement {
        table: 7,
        id: Some(StatementId { frontend: 2, number: 3 }),
        kind: Some(proto::DmlKind { kind }),
    };
    let rows = proto::Rows { batch: vec![9].into(), weights: vec![-1], crc: 1 };
    let part = proto::DmlPart { statement: Some(statement), rows: Some(rows) };
    let expected = [
        "0a0c",
        "0807",
        "120408021003",
        "1a022200", // the statement: an upsert
        "120b",
        "0a0109",
        "120101",
        "1d01000000", // and its rows
    ];
    assert_eq!(hex(&part), expected.concat());
    let id = Some(StatementId { frontend: 2, number: 3 });
    let abandon = proto::AbandonRequest { id, tables: vec![7, 300] };
    assert_eq!(hex(&abandon), "0a04".to_owned() + "08021003" + "1203" + "07ac02");
    assert_eq!(hex(&proto::AbandonAnswer { is_over: true }), "0801");

    let range = proto::KeyRange { from: vec![1].into(), until: vec![2].into() };
    let ranges = proto::KeyRanges { ranges: vec![range] };
    let read = proto::ReadRowsRequest {
        job: 7,
        generation: 3,
        commits: 300,
        epoch: 5,
        table: 9,
        columns: vec![0, 300],
        wanted: Some(proto::read_rows_request::Wanted::Ranges(ranges)),
        limit: Some(0),
        max_bytes: 6,
    };
    let expected = [
        "0807",
        "1003",
        "18ac02",
        "2005",
        "2809",
        "320300ac02",
        "4208",
        "0a06",
        "0a0101",
        "120102", // the range
        "5000",
        "5806",
    ];
    assert_eq!(hex(&read), expected.concat());
    let rows = proto::Rows { batch: vec![9].into(), weights: vec![], crc: 1 };
    let answer = proto::ReadRowsAnswer { rows: vec![rows], positions: vec![2], refused: None };
    assert_eq!(hex(&answer), "0a08".to_owned() + "0a0109" + "1d01000000" + "120102");
    let refused = Some(proto::ReadRefusal::NotYet as i32);
    let answer = proto::ReadRowsAnswer { rows: vec![], positions: vec![], refused };
    assert_eq!(hex(&answer), "1802");

    let session = Some(proto::SessionId { process: 9, pid: 7 });
    let lock = proto::AdvisoryLock { first: -1, second: Some(1), shared: true };
    let take = proto::TakeLockRequest { session, lock: Some(lock), waits: true, number: 3 };
    assert_eq!(hex(&take), "0a04".to_owned() + "08091007" + "1206" + "080110021801" + "18012003");

    let hello = proto::HandshakeRequest { protocol: 1, build: "b".into() };
    assert_eq!(hex(&hello), "0801120162");
    let answer = proto::HandshakeAnswer {
        protocol: 1,
        build: "b".into(),
        incarnation: 3,
        term: 300,
        leads: true,
        leader: "m".into(),
        leader_silence_ms: Some(0),
        log_wait_ms: 300,
        store_id: vec![7].into(),
    };
    let expected =
        ["0801", "120162", "1803", "20ac02", "2801", "32016d", "3800", "40ac02", "4a0107"];
    assert_eq!(hex(&answer), expected.concat());

    let answer = proto::HeartbeatAnswer { record: 300, log_wait_ms: 5 };
    assert_eq!(hex(&answer), "08ac02".to_owned() + "1005");

    let refusal = proto::NotLeader { leader: "m".into(), term: 300 };
    let refusal = proto::Refusal { reason: Some(proto::refusal::Reason::NotLeader(refusal)) };
    assert_eq!(hex(&refusal), "3a06".to_owned() + "0a016d" + "10ac02");
    let (caller, called) = (vec![7].into(), vec![8].into());
    let refusal = proto::OtherStore { caller, called, leads: true };
    let refusal = proto::Refusal { reason: Some(proto::refusal::Reason::OtherStore(refusal)) };
    assert_eq!(hex(&refusal), "4208".to_owned() + "0a0107" + "120108" + "1801");
}

#[test]
fn golden_changes_by_an_operator() {
    let id = Some(StatementId { frontend: 2, number: 300 });
    let by_id = "080210ac02";
    let request = proto::MoveJobRequest { job: 7, worker: 300, id };
    assert_eq!(hex(&request), "0807".to_owned() + "10ac02" + "1a05" + by_id);
    let request = proto::DrainRequest { worker: 300, undo: true, id };
    assert_eq!(hex(&request), "08ac02".to_owned() + "1001" + "1a05" + by_id);
    let request = proto::BackupRequest { name: "n".into(), id };
    assert_eq!(hex(&request), "0a016e".to_owned() + "1205" + by_id);
    // As builds without ids send them.
    assert_eq!(hex(&proto::DrainRequest { id: None, worker: 300, undo: false }), "08ac02");
    assert_eq!(hex(&proto::BackupRequest { name: "n".into(), id: None }), "0a016e");
}
