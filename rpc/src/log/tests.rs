//! Golden bytes of the log's formats.

use super::*;

/// In place of CRC-32: the sum of the bytes.
fn sum(bytes: &[u8]) -> u32 {
    bytes.iter().map(|b| u32::from(*b)).sum()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// A failure here means that logs would not be readable: give the new format a new version and keep reading
/// the old one. The bytes are written by hand from the protobuf encoding.
#[test]
fn golden_log_record() {
    let set = SetSetting { name: "a".into(), value: Some("b".into()) };
    let record = LogRecord {
        number: 1,
        term: 2,
        leader: 3,
        prev_crc: 4,
        epoch: 300,
        entries: vec![LogEntry::from(Entry::SetSetting(set))],
        ..LogRecord::default()
    };
    let body = concat!(
        "0801",               // number
        "1002",               // term
        "190300000000000000", // leader
        "2504000000",         // predecessor's CRC
        "28ac02",             // epoch
        "3208",
        "4a06",
        "0a0161",
        "120162", // one entry: SetSetting a = b
    );
    let bytes = encode_frame(&record, sum);
    assert_eq!(hex(&bytes[..4]), "00000002", "the format version");
    assert_eq!(u32::from_be_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]), sum(&bytes[8..]));
    assert_eq!(hex(&bytes[8..]), body);
    assert_eq!(decode_frame::<LogRecord>(&bytes, sum).unwrap(), record);
}

/// As above.
#[test]
fn golden_record_and_snapshot_with_a_store_id() {
    use prost::Message;
    let store_id = crate::store_id::StoreId::new(0x0102, 0x0304).to_bytes();
    let id = "00000000000001020000000000000304";
    let record = LogRecord { number: 1, store_id: store_id.clone(), ..LogRecord::default() };
    let bytes = record.encode_to_vec();
    assert_eq!(hex(&bytes), "0801".to_owned() + "3a10" + id);
    assert_eq!(LogRecord::decode(&bytes[..]).unwrap(), record);
    let snapshot = Snapshot { store_id, ..Snapshot::default() };
    let bytes = snapshot.encode_to_vec();
    let body = "e20310".to_owned() + id;
    assert_eq!(hex(&bytes[bytes.len() - body.len() / 2..]), body);
    assert_eq!(Snapshot::decode(&bytes[..]).unwrap(), snapshot);
}

/// As above.
#[test]
fn golden_entries_of_detached_and_rebuilt_jobs() {
    use prost::Message;
    let entries = [
        Entry::Detach(Detach { job: 7, generation: 3, reason: "r".into() }),
        Entry::Rebuild(Rebuild { job: 7 }),
    ];
    let bytes = entries.map(|entry| hex(&LogEntry::from(entry).encode_to_vec()));
    assert_eq!(bytes, ["6a0708071003".to_owned() + "1a0172", "72020807".to_owned()]);
}

/// As above. One without an id has the bytes that it had before there were ids.
#[test]
fn golden_entry_and_snapshot_of_a_definition_with_an_id() {
    use crate::version::StatementId;
    use prost::Message;
    let id = StatementId { frontend: 2, number: 300 };
    let create = Entry::CreateSchema(CreateSchema { name: "s".into() });
    let entry = LogEntry { statement: Some(id), entry: Some(create.clone()) };
    let schema = "1a03".to_owned() + "0a0173";
    assert_eq!(hex(&LogEntry::from(create).encode_to_vec()), schema);
    let bytes = entry.encode_to_vec();
    assert_eq!(hex(&bytes), schema + "a20605" + "0802" + "10ac02");
    assert_eq!(LogEntry::decode(&bytes[..]).unwrap(), entry);

    let definition = CommittedDefinition { id, epoch: 5, relation: Some(7) };
    let snapshot = Snapshot { definitions: vec![definition], ..Snapshot::default() };
    let body = concat!(
        "d2050b", "0a05", "0802", "10ac02", // its id,
        "1005",   // at 5,
        "1807",   // which created relation 7
    );
    let bytes = snapshot.encode_to_vec();
    assert_eq!(hex(&bytes[bytes.len() - body.len() / 2..]), body);
    assert_eq!(Snapshot::decode(&bytes[..]).unwrap(), snapshot);
}

/// As above.
#[test]
fn golden_entry_of_moved_parts() {
    use prost::Message;
    let part =
        MovedPart { job: 7, from_object: "a".into(), from_offset: 300, length: 5, offset: 6 };
    let moved = Entry::MoveParts(MoveParts { object: "b".into(), parts: vec![part] });
    let body = concat!(
        "e20311", "0a0162", // the new object
        "120c",   // one part
        "0807",   // of job 7,
        "120161", // which lay in object a
        "18ac02", // from 300 on,
        "2005",   // 5 bytes long,
        "2806",   // and begins at 6 now
    );
    let bytes = LogEntry::from(moved.clone()).encode_to_vec();
    assert_eq!(hex(&bytes), body);
    let read = LogEntry::decode(&bytes[..]).unwrap();
    assert_eq!(read.entry, Some(moved));
}

/// As above.
#[test]
fn golden_entries_of_processes() {
    use prost::Message;
    let roles = vec![ProcessRole::Meta as i32, ProcessRole::Compute as i32];
    let entries = [
        Entry::RegisterProcess(RegisterProcess { nonce: 1, roles, address: "a".into() }),
        Entry::FenceProcess(FenceProcess { incarnations: vec![7, 300] }),
        Entry::PlaceJobs(PlaceJobs { incarnation: 7, jobs: vec![5, 6], by_operator: false }),
        Entry::PlaceJobs(PlaceJobs { incarnation: 7, jobs: vec![5], by_operator: true }),
        Entry::GiveUp(GiveUp { incarnation: 7, names: vec!["n".into()] }),
        Entry::DrainProcess(DrainProcess { incarnation: 7, undo: true }),
    ];
    let expected = [
        "b20410".to_owned() + "090100000000000000" + "12020103" + "1a0161",
        "ba0405".to_owned() + "0a0307ac02",
        "c20406".to_owned() + "0807" + "12020506",
        "c20407".to_owned() + "0807" + "120105" + "1801",
        "ca0405".to_owned() + "0807" + "12016e",
        "d20404".to_owned() + "0807" + "1001",
    ];
    for (entry, expected) in entries.into_iter().zip(expected) {
        let bytes = LogEntry::from(entry.clone()).encode_to_vec();
        assert_eq!(hex(&bytes), expected);
        assert_eq!(LogEntry::decode(&bytes[..]).unwrap().entry, Some(entry));
    }
}

/// As above.
#[test]
fn golden_snapshot_of_processes() {
    use prost::Message;
    let registration = RegisterProcess { nonce: 1, roles: vec![3], address: String::new() };
    let process =
        ProcessSnapshot { incarnation: 7, registration, epoch: 300, number: 5, drained: true };
    let snapshot = Snapshot {
        last_incarnation: 8,
        processes: vec![process],
        fenced_nonces: vec![2],
        ..Snapshot::default()
    };
    let body = concat!(
        "c00208", // the newest incarnation
        "ca0217",
        "0807", // incarnation 7
        "120c",
        "090100000000000000",
        "120103", // nonce 1, a compute process
        "18ac02",
        "2005",                   // registered at 300, by record 5
        "2801",                   // it is drained
        "d202080200000000000000", // nonce 2 is fenced
    );
    let bytes = snapshot.encode_to_vec();
    let body_at = bytes.len() - body.len() / 2;
    assert_eq!(hex(&bytes[body_at..]), body);
    assert_eq!(Snapshot::decode(&bytes[..]).unwrap(), snapshot);
}

/// As above.
#[test]
fn golden_entries_and_snapshot_of_backups() {
    use prost::Message;
    let entries = [
        Entry::CreateBackup(CreateBackup { name: "b".into() }),
        Entry::ReleaseBackup(ReleaseBackup { name: "b".into() }),
    ];
    for (entry, expected) in entries.into_iter().zip(["8205030a0162", "8a05030a0162"]) {
        let bytes = LogEntry::from(entry.clone()).encode_to_vec();
        assert_eq!(hex(&bytes), expected);
        assert_eq!(LogEntry::decode(&bytes[..]).unwrap().entry, Some(entry));
    }
    let (name, objects) = ("b".to_owned(), vec!["n".to_owned(), "o".to_owned()]);
    let backup = BackupSnapshot { name, number: 5, epoch: 300, objects, bytes: 7, statement: None };
    let statement = Some(StatementId { frontend: 2, number: 3 });
    let by_id = BackupSnapshot { statement, ..backup.clone() };
    let snapshot = Snapshot { backups: vec![backup, by_id], ..Snapshot::default() };
    let body = concat!(
        "920310", "0a0162", // called b
        "1005", "18ac02", // record 5, epoch 300
        "22016e", "22016f", // two objects,
        "2807",   // and 7 bytes of them
        "920316", "0a0162", "1005", "18ac02", "22016e", "22016f", "2807", // the same,
        "3204", "08021003", // asked for by an id
    );
    let bytes = snapshot.encode_to_vec();
    assert_eq!(hex(&bytes[bytes.len() - body.len() / 2..]), body);
    assert_eq!(Snapshot::decode(&bytes[..]).unwrap(), snapshot);
}

#[test]
fn golden_log_snapshot() {
    let snapshot = Snapshot {
        number: 1,
        crc: 2,
        term: 3,
        leader: 4,
        epoch: 300,
        next_relation_id: 5,
        next_table_id: 6,
        schemas: vec!["s".into()],
        settings: [("a".to_string(), "b".to_string())].into(),
        garbage: [("o".to_string(), 7)].into(),
        sources: vec![SourceSnapshot {
            source: 8,
            timeline: TimelineSnapshot {
                steps: vec![300, 1],
                volumes: vec![5],
                last_change: 9,
                ..TimelineSnapshot::default()
            },
            ..SourceSnapshot::default()
        }],
        ..Snapshot::default()
    };
    let body = concat!(
        "0801",               // number
        "1502000000",         // the record's CRC
        "1803",               // term
        "210400000000000000", // leader
        "28ac02",             // epoch
        "3005",
        "3806",   // next ids
        "420173", // schema s
        "5a0e",
        "0808",
        "1a0a",
        "1009",
        "1a03ac0201", // source 8: changed at 9, one segment from 300 to 301
        "220105",     // which begins after 5 bytes of change
        "6206",
        "0a0161",
        "120162", // setting a = b
        "6a05",
        "0a016f",
        "1007", // garbage o since 7
    );
    let bytes = encode_frame(&snapshot, sum);
    assert_eq!(hex(&bytes[8..]), body);
    assert_eq!(decode_frame::<Snapshot>(&bytes, sum).unwrap(), snapshot);
}

#[test]
fn bytes_that_are_no_record_are_refused_by_what_is_wrong() {
    let bytes = encode_frame(&LogRecord { number: 1, ..LogRecord::default() }, sum);
    let read = |bytes: &[u8]| decode_frame::<LogRecord>(bytes, sum).unwrap_err();
    assert_eq!(read(&bytes[..7]), FrameError::Short);
    let with = |at: usize, byte: u8| {
        let mut bytes = bytes.to_vec();
        bytes[at] = byte;
        bytes
    };
    assert_eq!(read(&with(3, 3)), FrameError::Newer { needed: 3 });
    // Of an earlier format.
    assert!(decode_frame::<LogRecord>(&with(3, 1), sum).is_ok());
    assert_eq!(read(&with(3, 0)), FrameError::Version(0));
    assert_eq!(read(&with(9, 2)), FrameError::Checksum);
    // A field whose value is missing, under a sum that is right.
    let body = [0x08];
    let frame: Vec<u8> = [&[0, 0, 0, 1, 0, 0, 0, 8][..], &body].concat();
    assert!(matches!(read(&frame), FrameError::Decode(_)));
}
