//! Mail delivery: each message is made under a temporary name, written, made durable, renamed into
//! the mailbox, and the mailbox is made durable. A client has a mailbox of its own.
use super::{Findings, Place, Settings};
use crate::client;
use crate::target::Open;
use cairn_environment::clock;

const MESSAGE_BYTES: usize = 4096;

pub fn run(place: &Place, settings: &Settings) -> anyhow::Result<Findings> {
    let in_clients = place.clone();
    let measured =
        client::run(&settings.timed_plan("small-durable-files"), move |client, recorder| {
            let target = &*in_clients.target;
            let mailbox = in_clients.path(&format!("mailbox-{}", client.index));
            target.make_directory(&mailbox)?;
            let directory = target.open(&mailbox, Open::Directory)?;
            let message = vec![0x4d; MESSAGE_BYTES];
            let mut number = 0_u64;
            while client.goes_on() {
                let (temporary, name) =
                    (format!("{mailbox}/tmp-{number}"), format!("{mailbox}/new-{number}"));
                let start = clock::now_monotonic();
                let file = recorder.time("create", || target.open(&temporary, Open::Create))?;
                recorder.time("write", || file.write_at(&message, 0))?;
                recorder.time("fsync file", || file.sync())?;
                drop(file);
                recorder.time("rename", || target.rename(&temporary, &name))?;
                recorder.time("fsync directory", || directory.sync())?;
                recorder.record("delivery", start);
                client.completed();
                number += 1;
            }
            Ok(())
        })?;
    Ok(Findings::of_rate(measured, "deliveries/s"))
}
