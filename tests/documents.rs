//! The documents say what the code does: option and metric tables, and every path they name.

#![expect(clippy::panic, reason = "a test helper fails by panicking")]
use std::collections::BTreeSet;
use std::path::Path;
use warmpath::config::OPTIONS;
use warmpath::metrics::{ALL, Kind};
use warmpath::route::Reason;

fn document(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Rows of the table whose header row begins with `| heading |`, as their cells.
fn table(text: &str, heading: &str) -> Vec<Vec<String>> {
    let start = format!("| {heading} |");
    let rows: Vec<Vec<String>> = text
        .lines()
        .skip_while(|line| !line.starts_with(&start))
        .skip(2)
        .take_while(|line| line.starts_with('|'))
        .map(|line| {
            line.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect()
        })
        .collect();
    assert!(!rows.is_empty(), "no table with the heading {heading:?}");
    rows
}

fn code(cell: &str) -> String {
    cell.trim_matches('`').to_owned()
}

#[test]
fn readme_lists_every_option_with_its_default_and_unit() {
    let listed: Vec<[String; 3]> = table(&document("README.md"), "Option")
        .iter()
        .map(|row| [code(&row[0]), code(&row[1]), row[2].clone()])
        .collect();
    let real: Vec<[String; 3]> = OPTIONS
        .iter()
        .map(|(path, default, unit)| {
            let default = match *default {
                "" => "required",
                "-" => "none",
                default => default,
            };
            [(*path).to_owned(), default.to_owned(), (*unit).to_owned()]
        })
        .collect();
    assert_eq!(listed, real);
}

/// What the documents say beyond the README's tables is of options and values that there are.
#[test]
fn documents_in_depth_name_options_and_values_that_there_are() {
    let configure = document("docs/configure.md");
    let items = configure.lines().filter_map(|line| line.strip_prefix("- **"));
    let mut options = 0;
    for item in items {
        let (names, _) = item.split_once("**:").unwrap_or_else(|| panic!("{item}"));
        for name in names.split('`').skip(1).step_by(2) {
            let within = |path: &str| path == name || path.starts_with(&format!("{name}."));
            assert!(OPTIONS.iter().any(|(path, ..)| within(path)), "there is no option {name}");
            options += 1;
        }
    }
    assert!(options >= 20, "only {options} options");

    let source = sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"));
    let watch = document("docs/watch.md");
    let rows = watch.lines().filter(|line| line.starts_with("| `warmpath_"));
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let mut values = 0;
    for row in rows {
        for word in row.split('`').skip(1).step_by(2).filter(|word| word.chars().all(plain)) {
            assert!(source.contains(&format!("\"{word}\"")), "src has no {word:?}: {row}");
            values += 1;
        }
    }
    assert!(values >= 120, "only {values} values");
    // A label whose values are neither names nor addresses nor the operator's is explained.
    let evident = ["cluster", "replica", "model", "class"];
    for metric in ALL.iter().filter(|metric| metric.labels.iter().any(|l| !evident.contains(l))) {
        let named = |row: &str| row.contains(&format!("`{}`", metric.name));
        let found = watch.lines().any(|row| row.starts_with("| `") && named(row));
        assert!(found, "docs/watch.md does not say what the labels of {} are", metric.name);
    }
}

#[test]
fn readme_lists_every_metric_with_its_kind_labels_and_meaning() {
    let listed: Vec<[String; 4]> = table(&document("README.md"), "Metric")
        .iter()
        .map(|row| [code(&row[0]), row[1].clone(), row[2].clone(), row[3].clone()])
        .collect();
    let real: Vec<[String; 4]> = ALL
        .iter()
        .map(|metric| {
            let kind = match metric.kind {
                Kind::Counter => "counter",
                Kind::Gauge => "gauge",
                Kind::Histogram => "histogram",
            };
            [metric.name, kind, &metric.labels.join(", "), metric.help].map(str::to_owned)
        })
        .collect();
    assert_eq!(listed, real);
    let long = ALL.iter().find(|metric| metric.help.len() > 110);
    assert_eq!(long, None, "its details go into docs/watch.md");
}

#[test]
fn readme_lists_every_reason() {
    let listed: Vec<String> =
        table(&document("README.md"), "Reason").iter().map(|row| code(&row[0])).collect();
    let real: Vec<&str> = Reason::ALL.iter().map(|reason| reason.as_str()).collect();
    assert_eq!(listed, real);
}

#[test]
fn the_shipped_envoy_takes_every_label_out_of_its_name() {
    let envoy = document("envoy/envoy.yaml");
    let labels: BTreeSet<&str> = ALL.iter().flat_map(|metric| metric.labels).copied().collect();
    for label in labels {
        let tag = format!("{{tag_name: {label}, regex: '^wasmcustom\\..*?({label}=([^;]*);)'}}");
        assert!(envoy.contains(&tag), "stats_tags lacks {tag}");
    }
}

/// The shipped Envoy configurations, by name.
fn envoy_files() -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("envoy");
    let entries = std::fs::read_dir(&folder).unwrap_or_else(|error| panic!("envoy/: {error}"));
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let files = names.filter(|name| name.ends_with(".yaml"));
    files.map(|name| (name.clone(), document(&format!("envoy/{name}")))).collect()
}

/// Whether these lines stand in a file one behind the other, all indented as the first one is.
fn holds(file: &str, block: &[&str]) -> bool {
    let lines: Vec<&str> = file.lines().collect();
    lines.windows(block.len()).any(|window| {
        let first = window.first().copied().unwrap_or_default();
        let indent = &first[..first.len() - first.trim_start().len()];
        let is_same = |line: &str, wanted: &str| match line.strip_prefix(indent) {
            Some(line) => line == wanted,
            None => line.is_empty() && wanted.is_empty(),
        };
        window.iter().zip(block).all(|(line, wanted)| is_same(line, wanted))
    })
}

/// A text without the lines that are comments alone.
fn uncommented(text: &str) -> String {
    let lines = text.lines().filter(|line| !line.trim_start().starts_with('#'));
    lines.collect::<Vec<&str>>().join("\n")
}

/// README's leave the comments out, and may name a line in passing.
#[test]
fn documents_show_verbatim_parts_of_the_shipped_configurations() {
    let files = envoy_files();
    let plain: Vec<(&str, String)> =
        files.iter().map(|(name, file)| (name.as_str(), uncommented(file))).collect();
    for (name, least) in [("README.md", 5), ("docs/install.md", 7), ("docs/agents.md", 1)] {
        let text = document(name);
        let mut blocks = 0;
        for block in text.split("```yaml\n").skip(1) {
            let block: Vec<&str> = block.split("\n```").next().unwrap().lines().collect();
            let found = match name {
                "README.md" => plain.iter().any(|(_, file)| holds(file, &block)),
                _ => files.iter().any(|(_, file)| holds(file, &block)),
            };
            assert!(found, "no file of envoy/ has this part of {name}:\n{}", block.join("\n"));
            blocks += 1;
        }
        assert!(blocks >= least, "{name}: only {blocks} pieces");
    }
    let readme = document("README.md");
    let (_, main) = plain.iter().find(|(name, _)| *name == "envoy.yaml").unwrap();
    for line in [
        "per_connection_buffer_limit_bytes: 8388608",
        "request_body_buffer_limit: 12582912",
        "timeout: 0s",
        "idle_timeout: 600s",
    ] {
        assert!(readme.contains(&format!("`{line}`")) && holds(main, &[line]), "{line}");
    }
    let admin = "address: {socket_address: {address: 127.0.0.1, port_value: 9901}}";
    assert!(readme.contains(&format!("`admin: {{{admin}}}`")), "{admin}");
    assert!(holds(main, &["admin:", &format!("  {admin}")]), "{admin}");
    let file = "a:\n  b:\n    c: 1\n\n  d: 2\n";
    assert!(holds(file, &["b:", "  c: 1", "", "d: 2"]));
    assert!(!holds(file, &["b:", "c: 1"]));
}

#[test]
fn answers_may_be_long_and_silent_in_the_shipped_configurations() {
    for (name, file) in envoy_files() {
        let (_, rest) = file.split_once("stat_prefix: inference\n").unwrap();
        let (listener, _) = rest.split_once("http_filters:").unwrap();
        let limits: Vec<&str> = listener
            .lines()
            .map(|line| line.split('#').next().unwrap_or_default().trim())
            .filter(|line| line.contains("timeout") || line.contains("duration"))
            .collect();
        // The route's own is for the whole answer: none. Envoy has 15 s there, and 300 s for silence.
        let expected = ["stream_idle_timeout: 600s", "timeout: 0s", "idle_timeout: 600s"];
        assert_eq!(limits, expected, "{name}");
        let (_, clusters) = file.split_once("\n  clusters:\n").unwrap();
        let (replicas, _) = clusters.split_once("- name: replicas_poll").unwrap();
        let cuts = ["max_stream_duration", "idle_timeout", "max_connection_duration"];
        assert!(!cuts.iter().any(|cut| replicas.contains(cut)), "{name}");
    }
}

/// A variant has every line of the main file, in its order, but for the comment at the top and the admin.
#[test]
fn variants_of_the_shipped_configuration_differ_where_they_say() {
    let main = document("envoy/envoy.yaml");
    let (before, after) = main.split_once("\nadmin:\n").unwrap();
    let (_, after) = after.split_once("\n\n").unwrap();
    let main = [before, after].join("\n");
    let own = |line: &&str| !line.starts_with('#') && !line.contains("port_value: 9901");
    for (name, variant) in envoy_files() {
        let mut lines = variant.lines();
        for line in main.lines().filter(own) {
            assert!(lines.any(|other| other == line), "{name} lacks, or has elsewhere: {line}");
        }
    }
}

/// Those that find replicas by DNS have every line of the private variant, in its order, but for the places of files, how
/// replicas are found and how often their health is asked for.
#[test]
fn configurations_by_dns_differ_where_they_say() {
    let found = ["type: STATIC", "port_value: 800", "port_value: 900"];
    let other = ["filename:", "interval: 2s", "- timeout: 2s", "\"max_body_bytes\""];
    let differ = [found.as_slice(), other.as_slice()].concat();
    let main = document("envoy/private-admin.yaml");
    let main = main.replace(" # CHANGE", "");
    for name in ["envoy/compose/envoy.yaml", "envoy/kubernetes/envoy.yaml"] {
        let variant = document(name);
        let mut lines = variant.lines();
        let shared = main.lines().filter(|line| !line.trim_start().starts_with('#'));
        for line in shared.filter(|line| !differ.iter().any(|differ| line.contains(differ))) {
            assert!(lines.any(|other| other == line), "{name} lacks, or has elsewhere: {line}");
        }
        assert!(!variant.contains("port_value: 8001"), "{name}");
        assert!(variant.matches("{address: replica, port_value: ").count() >= 2, "{name}");
    }
}

/// The files of `docs/`, by their paths.
fn documents() -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs");
    let entries = std::fs::read_dir(folder).unwrap_or_else(|error| panic!("docs/: {error}"));
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    names.filter(|name| name.ends_with(".md")).map(|name| format!("docs/{name}")).collect()
}

#[test]
fn readme_is_short_and_leads_to_every_document() {
    let readme = document("README.md");
    let lines = readme.lines().count();
    assert!(lines <= 470, "{lines} lines");
    for name in documents() {
        assert!(readme.contains(&format!("`{name}`")), "README.md does not name {name}");
    }
}

#[test]
fn every_path_that_a_document_names_exists() {
    let main = ["README.md", "ARCHITECTURE.md", "CHANGELOG.md"].map(str::to_owned);
    let documents = documents();
    assert!(documents.len() >= 12, "{documents:?}");
    for name in main.into_iter().chain(documents) {
        let text = document(&name);
        let quoted = text.split('`').skip(1).step_by(2);
        let roots = ["src/", "tests/", "scripts/", "envoy/", ".ci/", "examples/", "docs/"];
        for path in quoted.filter(|path| roots.iter().any(|root| path.starts_with(root))) {
            let path = path.split_whitespace().next().unwrap_or(path);
            let found = Path::new(env!("CARGO_MANIFEST_DIR")).join(path).exists();
            assert!(found, "{name} names {path}, which is not there");
        }
    }
}

/// What the README lists is told by somebody: a metric that nobody tells is not there, and nothing says so.
#[test]
fn every_metric_is_told_by_the_shell() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let shell = sources(&root.join("src/shell"));
    let list = document("src/metrics.rs");
    let mut names = BTreeSet::new();
    for constant in list.split("\npub const ").skip(1) {
        let Some((name, rest)) = constant.split_once(": Metric =") else { continue };
        names.extend(rest.split('"').nth(1));
        let is_told = shell.split(&format!("metrics::{name}")).skip(1).any(|behind| {
            behind.chars().next().is_none_or(|next| !next.is_alphanumeric() && next != '_')
        });
        assert!(is_told, "nothing tells {name}");
    }
    assert_eq!(names, ALL.iter().map(|metric| metric.name).collect());
}

/// The words of a text that are names of metrics or of recording rules.
fn metric_names(text: &str) -> BTreeSet<&str> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "_:".contains(c);
    let words = text.split(|c: char| !is_part(c)).map(|word| word.trim_end_matches(':'));
    words.filter(|word| word.starts_with("warmpath_") || word.starts_with("warmpath:")).collect()
}

/// Rules, alerts, dashboard, page and documents name what there is, and every alert a section of a document.
#[test]
fn what_watches_names_metrics_rules_and_runbooks_that_there_are() {
    let (rules, alerts) = (
        document("envoy/prometheus/warmpath.rules.yml"),
        document("envoy/prometheus/warmpath.alerts.yml"),
    );
    // A group's own name is nobody else's.
    let ungrouped = |text: &str| -> String {
        let lines = text.lines().filter(|line| !line.starts_with("- name: "));
        lines.collect::<Vec<&str>>().join("\n")
    };
    let (rules, alerts) = (ungrouped(&rules), ungrouped(&alerts));
    let recorded: BTreeSet<&str> =
        rules.lines().filter_map(|line| line.trim().strip_prefix("- record: ")).collect();
    // Files, filter state, options and programs that begin like metrics.
    let others = ["warmpath_files", "warmpath_no_fallback", "warmpath_io"];
    for (file, text) in [
        ("envoy/prometheus/warmpath.rules.yml", rules.clone()),
        ("envoy/prometheus/warmpath.alerts.yml", alerts.clone()),
        (
            "envoy/grafana/dashboards/warmpath.json",
            document("envoy/grafana/dashboards/warmpath.json"),
        ),
        ("envoy/live.html", document("envoy/live.html")),
        ("envoy/kubernetes/hpa.yaml", document("envoy/kubernetes/hpa.yaml")),
        (
            "envoy/kubernetes/keda-scaledobject.yaml",
            document("envoy/kubernetes/keda-scaledobject.yaml"),
        ),
        ("scripts/scale.sh", document("scripts/scale.sh")),
        ("docs/operate.md", document("docs/operate.md")),
        ("docs/watch.md", document("docs/watch.md")),
        ("docs/configure.md", document("docs/configure.md")),
        ("docs/prompts.md", document("docs/prompts.md")),
        ("docs/troubleshoot.md", document("docs/troubleshoot.md")),
    ] {
        let mut named = 0;
        for name in metric_names(&text) {
            let plain = ["_bucket", "_count", "_sum"].iter().find_map(|end| name.strip_suffix(end));
            let exists = |name: &str| ALL.iter().any(|metric| metric.name == name);
            let known = exists(name) || plain.is_some_and(exists) || recorded.contains(name);
            named += usize::from(known);
            assert!(known || others.contains(&name) || name == "warmpath_", "{file} names {name}");
        }
        assert!(named > 0, "{file} names no metric");
    }
    let trouble = document("docs/troubleshoot.md");
    let anchor = |title: &str| title.to_lowercase().replace(' ', "-");
    let sections: BTreeSet<String> =
        trouble.lines().filter_map(|line| line.strip_prefix("## ")).map(anchor).collect();
    let runbooks = alerts.lines().filter_map(|line| line.trim().strip_prefix("runbook: "));
    let mut count = 0;
    for runbook in runbooks {
        let section = runbook.strip_prefix("docs/troubleshoot.md#").unwrap_or_default();
        assert!(sections.contains(section), "{runbook}: there are {sections:?}");
        count += 1;
    }
    assert_eq!(count, alerts.lines().filter(|line| line.contains("- alert: ")).count());
    assert!(count >= 15, "only {count} alerts");
}

/// A table that says what is configured has the numbers of the code.
#[test]
fn what_a_replica_is_to_have_is_said_as_it_is() {
    let usual = warmpath::scaling::ScalingConfig::default();
    let rows = table(&document("docs/operate.md"), "`kind`");
    let says =
        |row: usize, text: String| assert!(rows[row][2].contains(&text), "{:?}: {text}", rows[row]);
    says(0, format!("{:.0} %", usual.prefill_share * 100.0));
    assert!(
        (usual.backlog_s, usual.waiting) == (1.0, 2.0)
            && rows[1][2] == "one second"
            && rows[2][2] == "two"
    );
    says(3, format!("{:.0} %", usual.kv_usage * 100.0));
    let kinds: Vec<String> = rows.iter().map(|row| code(&row[0])).collect();
    assert_eq!(kinds, warmpath::scaling::Signal::ALL.map(warmpath::scaling::Signal::as_str));
}

/// Bounds that no option has stand in prose, with the numbers of the code.
#[test]
fn bounds_are_said_as_they_are() {
    use warmpath::replicas::{MAX_REPLICAS, MAX_SHADOW_BLOCKS, clusters};
    use warmpath::series::{MAX_OTHER_SERIES, MAX_REPLICA_SERIES};
    let thousands = |n: usize| format!("{},{:03}", n / 1000, n % 1000);
    let answer = clusters::MAX_ANSWER_BYTES >> 20;
    let (replicas, others) = (thousands(MAX_REPLICA_SERIES), thousands(MAX_OTHER_SERIES));
    let of_each = ALL.iter().filter(|metric| metric.labels.contains(&"replica")).count();
    for (name, texts) in [
        ("docs/install.md", vec![format!("read up to {answer} MB")]),
        (
            "docs/limits.md",
            vec![
                format!("**{answer} MB of the admin's answer**"),
                format!("**{} places for VMs**", warmpath::share::MAX_VM_SLOTS),
                format!("**{} million blocks** over all replicas", MAX_SHADOW_BLOCKS >> 20),
                format!("**{} replicas**", thousands(MAX_REPLICAS)),
                format!("{replicas} of replicas (a full table has {of_each} each at most)"),
                format!("and {others} others"),
            ],
        ),
        (
            "docs/troubleshoot.md",
            vec![
                format!("over {answer} MB"),
                format!("{replicas} series of replicas"),
                format!("{others} others"),
            ],
        ),
        ("docs/watch.md", vec![format!("the {} of an Envoy", warmpath::share::MAX_VM_SLOTS)]),
    ] {
        let text = document(name);
        let missing: Vec<&String> = texts.iter().filter(|said| !text.contains(*said)).collect();
        assert!(missing.is_empty(), "{name} does not say {missing:?}");
    }
}

/// The text of every file of Rust below a folder.
fn sources(folder: &Path) -> String {
    let entries = std::fs::read_dir(folder);
    let entries = entries.unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut text = String::new();
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        if path.is_dir() {
            text.push_str(&sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            text.push_str(&std::fs::read_to_string(&path).unwrap_or_default());
        }
    }
    text
}

/// What is compiled into a program from beside `src` is what the image's build sees, too. (Tests' data is not compiled there.)
#[test]
fn the_images_build_has_every_file_that_is_compiled_in() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let allowed = document(".dockerignore");
    let allowed: Vec<&str> = allowed.lines().filter_map(|line| line.strip_prefix('!')).collect();
    let source = sources(&root.join("src"));
    let mut files = 0;
    for include in source.split("include_str!(\"").chain(source.split("include_bytes!(\"")).skip(1)
    {
        let Some((path, _)) = include.split_once('"') else { continue };
        let path = path.trim_start_matches("../");
        if !path.ends_with(".md") && !path.starts_with("envoy/") {
            continue;
        }
        files += 1;
        assert!(
            allowed.iter().any(|allowed| path.starts_with(allowed)),
            ".dockerignore keeps out {path}"
        );
    }
    assert!(files > 0);
}

/// The files below a folder, as paths in it.
fn files_below(folder: &Path, prefix: &str) -> Vec<String> {
    let entries = std::fs::read_dir(folder);
    let entries = entries.unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut files = Vec::new();
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let place = format!("{prefix}{name}");
        if path.is_dir() {
            files.extend(files_below(&path, &format!("{place}/")));
        } else {
            files.push(place);
        }
    }
    files
}

/// Files of `envoy`, who tries them, and by which words there. A folder is the files in it, not its folders.
const TRIED: [(&str, &str, &str); 11] = [
    ("", "tests/envoy/start.rs", "for name in shipped()"),
    ("live.html", "tests/envoy/watched.rs", "the_live_page_shows_the_figures_of_stats"),
    ("compose/envoy.yaml", "tests/envoy/start.rs", "for name in shipped()"),
    ("compose/replica.sh", "Dockerfile", "COPY envoy/compose/replica.sh"),
    ("grafana/dashboards/", "tests/envoy/watched.rs", "envoy/grafana/dashboards/warmpath.json"),
    ("grafana/provisioning/dashboards/", "tests/documents.rs", "/warmpath.yaml\")["),
    ("grafana/provisioning/datasources/", "tests/documents.rs", "/prometheus.yaml\")["),
    ("istio/", "scripts/manifests/check.py", "envoy/istio/*.yaml"),
    ("kubernetes/", "scripts/manifests/check.py", "envoy/kubernetes/*.yaml"),
    ("kubernetes/envoy.yaml", "tests/envoy/start.rs", "for name in shipped()"),
    ("prometheus/", "scripts/test.sh", "check config envoy/prometheus/prometheus.yml"),
];

#[test]
fn every_shipped_file_is_tried_by_something() {
    let files = files_below(&Path::new(env!("CARGO_MANIFEST_DIR")).join("envoy"), "");
    assert!(files.len() >= 25, "{files:?}");
    for file in &files {
        let folder = &file[..file.rfind('/').map_or(0, |slash| slash + 1)];
        let of = |place: &str| TRIED.iter().find(|(tried, ..)| *tried == place);
        let Some((_, by, words)) = of(file).or_else(|| of(folder)) else {
            panic!("nobody tries envoy/{file}");
        };
        assert!(document(by).contains(words), "{by} does not try envoy/{file}: it lacks {words}");
    }
    // What is in these two folders is taken by its ending there.
    for file in files.iter().filter(|file| file.starts_with("istio/") || !file.contains('/')) {
        assert!(file.ends_with(".yaml") || file == "live.html", "nobody tries envoy/{file}");
    }
}

/// What every script does is asked in the same way, and asking does nothing else.
#[test]
fn every_script_says_what_it_is_for() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let names = files_below(&root.join("scripts"), "");
    let mut names: Vec<_> = names.iter().filter(|name| name.ends_with(".sh")).collect();
    // Those are parts of scripts.
    names.retain(|name| !name.contains('/') && *name != "children.sh");
    assert!(names.len() >= 14, "{names:?}");
    for name in names.iter().map(|name| name.as_str()) {
        for wish in ["--help", "-h"] {
            let mut command = std::process::Command::new("bash");
            // By a name that leads there from here only.
            let asked = command.current_dir(root.join("scripts")).args([name, wish]);
            let asked = asked.output().unwrap();
            let said = String::from_utf8(asked.stdout).unwrap();
            assert!(asked.status.success(), "{name} {wish}: {}", asked.status);
            assert!(said.contains(&format!("scripts/{name}")), "{name} {wish}: {said}");
            assert!(!said.contains("set -e"), "{name} {wish}: {said}");
            assert_eq!(String::from_utf8_lossy(&asked.stderr), "", "{name} {wish}");
        }
    }
}

/// Cargo keeps one library per profile, whatever its features: two scripts that want others compile it in turns.
#[test]
fn the_programs_of_all_scripts_have_the_same_features() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut names = files_below(&root.join("scripts"), "scripts/");
    // A released program has no more in it than it needs; what is fuzzed has a profile of its own.
    let apart = ["scripts/release.sh", "scripts/fuzz.sh"];
    names.retain(|name| name.ends_with(".sh") && !apart.contains(&name.as_str()));
    let texts: Vec<_> = names.iter().map(|name| document(name).replace("\\\n", " ")).collect();
    let builds = texts.iter().flat_map(|text| text.lines()).filter(|line| {
        let compiles =
            ["build", "run", "test"].map(|verb| line.contains(&format!("cargo {verb} --")));
        compiles.contains(&true) && !line.contains("--target wasm32-wasip1")
    });
    let builds: Vec<_> = builds.collect();
    assert!(builds.len() >= 10, "{builds:#?}");
    for line in builds {
        assert!(line.contains("--features demo"), "{line}");
    }
}

/// Python leaves running what it started when it is asked to end, unless it says otherwise.
#[test]
fn what_a_program_of_the_scripts_starts_ends_with_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let names = files_below(&root.join("scripts"), "scripts/");
    let mut starting = 0;
    for name in names.iter().filter(|name| name.ends_with(".py")) {
        let text = document(name);
        // What is started for a block ends with its own input.
        if !text.replace("with subprocess.Popen(", "").contains("Popen(") {
            continue;
        }
        starting += 1;
        let ends = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))";
        let is_told = text.contains(ends) || text.contains("\nfrom gateway import ");
        assert!(is_told, "{name} leaves running what it started");
    }
    assert!(starting >= 8, "{starting}");
}

/// No test runs Grafana, so what it is told is held against what docker-compose.yml has.
#[test]
fn grafana_is_told_where_its_dashboard_and_its_prometheus_are() {
    let read = |name: &str| -> serde_json::Value {
        let text = document(&format!("envoy/grafana/{name}"));
        serde_yaml_ng::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"))
    };
    let compose: serde_json::Value =
        serde_yaml_ng::from_str(&document("docker-compose.yml")).unwrap();
    let provider = &read("provisioning/dashboards/warmpath.yaml")["providers"][0];
    let folder = provider["options"]["path"].as_str().unwrap();
    let source = &read("provisioning/datasources/prometheus.yaml")["datasources"][0];
    let mounts = compose["services"]["grafana"]["volumes"].as_array().unwrap();
    for (ours, theirs) in [("dashboards", folder), ("provisioning", "/etc/grafana/provisioning")] {
        let mount = format!("./envoy/grafana/{ours}:{theirs}:ro");
        assert!(mounts.iter().any(|volume| *volume == *mount), "{mounts:?} lack {mount}");
    }
    assert_eq!(source["url"], "http://prometheus:9090");
    let port = compose["services"]["prometheus"]["ports"][0].as_str().unwrap();
    assert!(port.ends_with(":9090"), "{port}");
    let dashboard = read("dashboards/warmpath.json");
    let variable = &dashboard["templating"]["list"][0];
    assert_eq!((&variable["type"], &variable["query"]), (&"datasource".into(), &source["type"]));
    let panels = dashboard["panels"].as_array().unwrap();
    for panel in panels.iter().filter(|panel| panel["type"] != "row") {
        assert_eq!(panel["datasource"]["uid"], "${datasource}", "{}", panel["title"]);
    }
}

/// The names of all tests, and of the steps of `scripts/test.sh`.
fn tests() -> BTreeSet<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = sources(&root.join("src")) + &sources(&root.join("tests"));
    let name = |after: &str| {
        let (_, rest) = after.split_once("fn ")?;
        Some(rest.split_once('(')?.0.to_owned())
    };
    let marks = ["#[test]", "#[tokio::test"];
    let found = marks.iter().flat_map(|mark| text.split(mark).skip(1)).filter_map(name);
    let mut names: BTreeSet<String> = found.collect();
    let script = document("scripts/test.sh");
    let step = |line: &str| Some(line.strip_prefix("step_")?.split_once("()")?.0.to_owned());
    names.extend(script.lines().filter_map(step).map(|name| format!("step_{name}")));
    names
}

#[test]
fn each_complaint_from_the_field_has_a_test_or_a_reason() {
    let limits = document("docs/limits.md");
    let (_, complaints) = limits.split_once("## Complaints").unwrap();
    let (tests, mut seen) = (tests(), BTreeSet::new());
    for line in complaints.lines().filter(|line| line.starts_with("| ") && !line.contains("---")) {
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let &[number, complaint, source, by] = cells.as_slice() else { panic!("{line}") };
        if number.is_empty() {
            continue;
        }
        assert!(seen.insert(number.to_owned()) && !complaint.is_empty(), "{line}");
        assert!(source.starts_with('[') && source.contains("](https://"), "{line}");
        let named: Vec<&str> = by.split('`').skip(1).step_by(2).collect();
        let limit = by.split_once("limit: ").map_or("", |(_, reason)| reason);
        assert!(!named.is_empty() || !limit.is_empty(), "{line}");
        for name in named {
            assert!(tests.contains(name), "no test is called {name}");
        }
    }
    assert!(seen.len() >= 110, "only {} complaints", seen.len());
    let said = format!("for {} public complaints", seen.len());
    assert!(document("README.md").contains(&said), "README.md lacks: {said}");
}

/// Every metric is seen in a run: in that of `scripts/test.sh watched`, or in a test that is named there and asks for it.
#[test]
fn a_metric_that_the_watched_run_lacks_is_seen_by_the_test_that_it_names() {
    let watched = document("tests/envoy/watched.rs");
    let (_, list) = watched.split_once("const SEEN_ELSEWHERE:").unwrap();
    let (_, list) = list.split_once('=').unwrap();
    let (list, _) = list.split_once("];").unwrap();
    let words: Vec<&str> = list.split('"').skip(1).step_by(2).collect();
    let text = sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests"));
    for pair in words.chunks(2) {
        let &[metric, test] = pair else { panic!("{words:?}") };
        assert!(ALL.iter().any(|known| known.name == metric), "{metric}");
        let (_, body) = text.split_once(&format!("fn {test}() {{")).unwrap();
        let body = body.split("#[test]").next().unwrap_or_default();
        assert!(body.contains(&format!("{metric:?}")), "{test} does not look at {metric}");
    }
}

#[test]
fn architecture_stays_a_map() {
    let lines = document("ARCHITECTURE.md").lines().count();
    assert!(lines <= 150, "{lines} lines");
}
