//! What harms the cluster: processes are killed and stopped, links are cut, the operator moves jobs.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use millrace_common::RelationId;
use millrace_common::task::{Gate, within};
use millrace_rpc::operator::OperatorService;

use super::members::Member;
use super::world::{COMPACTOR, METAS, NODES, Node, STORE, WORKERS, World};
use crate::meta::Meta;

/// How long a process that ends waits for others.
const END: Duration = Duration::from_secs(2);

/// Harms the cluster for so long.
pub async fn rage(world: Arc<World>, time: Duration) {
    world.is_rough.store(true, Ordering::Relaxed);
    let until = world.began.elapsed() + time;
    while world.began.elapsed() < until {
        tokio::time::sleep(world.numbers.between(100, world.climate.pause)).await;
        harm(&world);
    }
}

/// All links are whole, all processes run, and nothing is lost any more.
pub fn heal(world: &Arc<World>) {
    world.note(|| "heal".to_owned());
    world.is_rough.store(false, Ordering::Relaxed);
    world.network.mend_all();
    for node in 0..NODES {
        world.stop(node, false);
        if world.process(node).is_none() {
            world.start(node);
        }
    }
}

fn any(world: &World) -> Node {
    if world.climate.harms_leaders_only {
        return world.numbers.of(&METAS);
    }
    match world.numbers.below(10) {
        0..4 => world.numbers.of(&METAS),
        4..8 => world.numbers.of(&WORKERS),
        _ => world.numbers.below(NODES as u64) as Node,
    }
}

fn harm(world: &Arc<World>) {
    let (node, weights) = (any(world), world.climate.harm);
    let mut drawn = world.numbers.below(weights.iter().sum());
    let kind = weights.iter().position(|weight| {
        let is_it = drawn < *weight;
        drawn = drawn.saturating_sub(*weight);
        is_it
    });
    match kind {
        Some(0) => {
            world.kill(node);
            later(world, world.numbers.between(100, 4_000), move |world| {
                if world.process(node).is_none() {
                    world.start(node);
                }
            });
        }
        Some(1) => {
            world.stop(node, true);
            let time = world.numbers.between(300, 11_000);
            later(world, time, move |world| world.stop(node, false));
        }
        Some(2) => {
            let is_one_way = world.numbers.chance(400);
            world.note(|| format!("cut {node} off the store, one way: {is_one_way}"));
            cut(world, node, STORE, is_one_way);
        }
        Some(3) => {
            let others = world.numbers.below(1 << NODES);
            let is_one_way = world.numbers.chance(400);
            world.note(|| format!("cut {node} off {others:#b}, one way: {is_one_way}"));
            for other in (0..NODES).filter(|other| *other != node && others >> other & 1 == 1) {
                cut(world, node, other, is_one_way);
            }
        }
        Some(4) => operate(world),
        Some(5) => end(world, node),
        Some(6) => isolate(world),
        _ => {}
    }
}

/// A process ends in order: the leader resigns, others leave.
fn end(world: &Arc<World>, node: Node) {
    let Some(process) = world.process(node) else { return };
    world.note(|| format!("{node} is to end"));
    let (world, gate) = (Arc::clone(world), Arc::clone(&process.gate) as Arc<dyn Gate>);
    tokio::spawn(within(gate, async move {
        match (process.seat(), process.follower()) {
            (Some(seat), _) if seat.leads.swap(false, Ordering::Relaxed) => {
                seat.meta.shutdown().await;
                let _ = tokio::time::timeout(END, seat.meta.resign()).await;
            }
            (_, Some(follower)) if process.incarnation() > 0 => {
                let member = Member::of(&world, &process, follower);
                let _ = tokio::time::timeout(END, member.leave()).await;
            }
            _ => {}
        }
        world.restart(&process, "ends in order");
    }));
}

/// For a while the leader reaches nobody but the frontends, which may go on asking it.
fn isolate(world: &Arc<World>) {
    let leads = |node: &&Node| world.process(**node).is_some_and(|p| p.leader().is_ok());
    let Some(leader) = METAS.iter().find(leads).copied() else { return };
    world.note(|| format!("isolate {leader}"));
    let time = world.numbers.between(4_000, 16_000);
    let others = METAS.into_iter().chain(WORKERS).chain([COMPACTOR, STORE]);
    for other in others.filter(|other| *other != leader) {
        cut_for(world, (leader, other), false, time);
    }
}

fn cut(world: &Arc<World>, a: Node, b: Node, is_one_way: bool) {
    let link = if world.numbers.chance(500) { (a, b) } else { (b, a) };
    let time = world.numbers.between(300, 12_000);
    cut_for(world, link, is_one_way, time);
}

fn cut_for(world: &Arc<World>, (a, b): (Node, Node), is_one_way: bool, time: Duration) {
    world.network.cut(a, b);
    if !is_one_way {
        world.network.cut(b, a);
    }
    later(world, time, move |world| {
        world.network.mend(a, b);
        world.network.mend(b, a);
    });
}

fn later(world: &Arc<World>, pause: Duration, act: impl FnOnce(&Arc<World>) + Send + 'static) {
    let world = Arc::clone(world);
    tokio::spawn(async move {
        tokio::time::sleep(pause).await;
        act(&world);
    });
}

/// The operator has a job moved, or a process drained and taken back.
fn operate(world: &Arc<World>) {
    let leader = METAS.iter().find_map(|node| world.process(*node)?.leader().ok());
    let Some(meta) = leader else { return };
    let (jobs, workers) = world.read_head(|state| {
        let scans = state.jobs.iter().filter(|(_, job)| job.version.backfill.is_some());
        let mut jobs: Vec<RelationId> = scans.map(|(id, _)| *id).collect();
        if jobs.is_empty() {
            jobs.extend(state.jobs.keys());
        }
        let workers: Vec<u64> = state.processes.live().keys().copied().collect();
        (jobs, workers)
    });
    if jobs.is_empty() || workers.is_empty() {
        return;
    }
    if world.numbers.chance(250) {
        return back_up(world, meta);
    }
    let (job, worker) = (world.numbers.of(&jobs), world.numbers.of(&workers));
    let (moves, undo) = (world.numbers.chance(700), world.numbers.chance(700));
    world.note(|| format!("operate: {job} to {worker}, {moves} {undo}"));
    tokio::spawn(async move {
        // Refused where it makes no sense.
        match moves {
            true => drop(OperatorService::move_job(&*meta, job, worker, None).await),
            false => drop(OperatorService::drain(&*meta, worker, undo, None).await),
        }
    });
}

/// The operator makes a backup, or releases one.
fn back_up(world: &World, meta: Arc<Meta>) {
    let names: Vec<String> =
        world.read_head(|state| state.backups.iter().map(|backup| backup.name.clone()).collect());
    let releases = !names.is_empty() && world.numbers.chance(500);
    let name = match releases {
        true => names[world.numbers.below(names.len() as u64) as usize].clone(),
        false => format!("b{}", world.next_name()),
    };
    world.note(|| format!("operate: backup {name}, released: {releases}"));
    tokio::spawn(async move {
        match releases {
            true => drop(OperatorService::release_backup(&*meta, name, None).await),
            false => drop(OperatorService::create_backup(&*meta, name, None).await),
        }
    });
}
