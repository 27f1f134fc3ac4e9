//! Each client asks for an attribute that does not exist, again and again: no cache answers that,
//! and there is nothing to do for it. On a mount over FUSE it is the way to the server and back.
use super::{Findings, Place, Settings};
use crate::client;

pub fn run(place: &Place, settings: &Settings) -> anyhow::Result<Findings> {
    let in_clients = place.clone();
    let measured = client::run(&settings.timed_plan("round-trip"), move |client, recorder| {
        while client.goes_on() {
            recorder.time("round trip", || in_clients.target.ask(&in_clients.folder))?;
            client.completed();
        }
        Ok(())
    })?;
    Ok(Findings::of_rate(measured, "round trips/s"))
}
