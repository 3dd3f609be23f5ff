//! What an engine says over HTTP: its models, and how busy it is.
//!
//! It is asked while somebody reads the report, and until its models are known; otherwise it is left alone. Its pages are read by
//! the filter's own code, so that a replica looks the same with an agent and without.

use super::cache::Names;
use super::follow::Followed;
use super::server::Shared;
use crate::replicas::models::{self, Served};
use crate::replicas::stats;
use std::io::Read;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep};
use ureq::Agent;

/// Between two looks at whether there is anything to ask: a report says how busy the engine was at most so long ago.
const TICK: Duration = Duration::from_millis(200);

/// While the report was read within this time, the engine's page is. A filter that backs off reads it every two seconds.
const READ_LATELY: Duration = Duration::from_secs(5);

/// Between two looks at the engine's models: an adapter may be loaded at any time.
const MODELS: Duration = Duration::from_secs(5);

/// Between two such looks while models are wanted.
const MODELS_WANTED: Duration = Duration::from_secs(1);

/// An engine whose page takes longer says nothing.
const PATIENCE: Duration = Duration::from_secs(5);

/// Figures that are older are not told: whoever wants to know asks the engine itself.
const FRESH: Duration = Duration::from_secs(1);

/// Processes that started so close to each other, in seconds, are one: a page has the time with few digits.
const SAME_START_S: f64 = 0.5;

/// An engine's HTTP interface.
pub struct Engine {
    agent: Agent,
    url: String,
    token: Option<String>,
}

impl Engine {
    /// An engine behind a URL, which is not asked yet.
    ///
    /// # Errors
    /// When it is no URL.
    pub fn new(url: &str, token: Option<String>) -> Result<Self, String> {
        if !url.starts_with("http://") && !url.starts_with("https://") {
            return Err(format!("{url}: expected http://HOST:PORT or https://HOST:PORT"));
        }
        let config = Agent::config_builder();
        let agent = config.timeout_global(Some(PATIENCE)).max_redirects(0).build().into();
        Ok(Self { agent, url: url.trim_end_matches('/').to_owned(), token })
    }

    fn get(&self, path: &str, most_bytes: usize) -> Option<Vec<u8>> {
        let mut request = self.agent.get(format!("{}{path}", self.url));
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let mut response = request.call().ok()?;
        let mut body = Vec::new();
        let most = u64::try_from(most_bytes).ok()?.saturating_add(1);
        response.body_mut().as_reader().take(most).read_to_end(&mut body).ok()?;
        (body.len() <= most_bytes).then_some(body)
    }

    fn models(&self) -> Option<Vec<Served>> {
        models::served(&self.get("/v1/models", models::MAX_ANSWER_BYTES)?)
    }

    fn page(&self) -> Option<stats::Report> {
        let page = self.get("/metrics", stats::MAX_PAGE_BYTES)?;
        stats::Report::parse(&String::from_utf8_lossy(&page))
    }
}

/// What is known of an engine from its pages.
#[derive(Debug, Clone, Default)]
pub struct Known {
    /// Its page, and when it was read.
    pub page: Option<(stats::Report, Instant)>,
    /// Whose blocks it can have, once it is known.
    pub names: Option<Names>,
    /// Pages that were asked for.
    pub asked: u64,
    /// Those that were not to be had.
    pub failed: u64,
}

impl Known {
    /// The last page, and its age where its figures are fresh enough to be told.
    pub fn load(&self) -> Option<(&stats::Report, Option<Duration>)> {
        let (page, read_at) = self.page.as_ref()?;
        let age = read_at.elapsed();
        Some((page, Some(age).filter(|age| *age <= FRESH)))
    }
}

/// Asks an engine for ever.
pub async fn watch(engine: Engine, base: Option<String>, shared: Arc<Shared>) {
    let engine = Arc::new(engine);
    let mut models_at: Option<Instant> = None;
    let mut page_is_due = true;
    loop {
        let is_read = shared.was_read_within(READ_LATELY);
        if is_read || page_is_due {
            page_is_due = !read_page(&engine, &shared).await && page_is_due;
        }
        let is_wanted = shared.known().names.is_none() || wants_names(&shared.ranks);
        let due = if is_wanted { Some(MODELS_WANTED) } else { is_read.then_some(MODELS) };
        if due.is_some_and(|due| models_at.is_none_or(|at| at.elapsed() >= due)) {
            read_models(&engine, base.as_deref(), &shared).await;
            models_at = Some(Instant::now());
        }
        sleep(TICK).await;
    }
}

fn wants_names(ranks: &[Arc<Followed>]) -> bool {
    ranks.iter().any(|followed| followed.rank().cache().wants_names())
}

/// Reads the engine's page. Whether there was one.
async fn read_page(engine: &Arc<Engine>, shared: &Shared) -> bool {
    let engine = Arc::clone(engine);
    let page = tokio::task::spawn_blocking(move || engine.page()).await.ok().flatten();
    let mut known = shared.known();
    known.asked += 1;
    let Some(page) = page else {
        known.failed += 1;
        return false;
    };
    let before = known.page.as_ref().and_then(|(page, _)| page.started_at);
    let is_other = before.zip(page.started_at).is_some_and(|(a, b)| (a - b).abs() > SAME_START_S);
    let capacity = page.capacity_blocks;
    known.page = Some((page, Instant::now()));
    drop(known);
    for followed in &shared.ranks {
        followed.rank().set_capacity(capacity);
        if is_other {
            followed.rank().restarted();
            followed.wake.notify_one();
        }
    }
    true
}

async fn read_models(engine: &Arc<Engine>, base: Option<&str>, shared: &Shared) {
    let engine = Arc::clone(engine);
    let served = tokio::task::spawn_blocking(move || engine.models()).await.ok().flatten();
    let mut known = shared.known();
    known.asked += 1;
    let Some(names) = served.and_then(|served| names(&served, base)) else {
        known.failed += 1;
        return;
    };
    known.names = Some(names.clone());
    drop(known);
    shared.set_names(&names);
}

/// Whose blocks an engine can have that lists these models: those of its first, under the name that is given for it.
fn names(served: &[Served], base: Option<&str>) -> Option<Names> {
    let first = served.iter().find(|model| !model.is_adapter());
    let base = base.or_else(|| first.map(|model| model.name.as_str()))?.to_owned();
    let adapters = served.iter().filter(|model| model.is_adapter());
    let adapters = adapters.map(|model| (model.name.clone(), model.root)).collect();
    Some(Names { base, adapters })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn served(name: &str, parent: u64) -> Served {
        Served { name: name.to_owned(), root: 7, parent }
    }

    #[test]
    fn the_first_model_is_the_base_unless_another_name_is_given() {
        let models = [served("lora", 3), served("a", 0), served("b", 0)];
        let adapters = vec![("lora".to_owned(), 7)];
        let named = |base: &str| Some(Names { base: base.to_owned(), adapters: adapters.clone() });
        assert_eq!(names(&models, None), named("a"));
        assert_eq!(names(&models, Some("prod")), named("prod"));
        assert_eq!(names(&models[..1], None), None);
    }

    #[test]
    fn a_url_has_a_scheme() {
        assert!(Engine::new("http://127.0.0.1:8000/", None).is_ok());
        let error = Engine::new("127.0.0.1:8000", None).err();
        assert_eq!(
            error.unwrap(),
            "127.0.0.1:8000: expected http://HOST:PORT or https://HOST:PORT"
        );
    }
}
