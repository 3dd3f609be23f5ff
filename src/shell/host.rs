//! Every call to Envoy, as a function that returns what it got.
//!
//! The SDK's own conveniences panic on what happens in practice (a header that is not UTF-8, a
//! call in the wrong phase), and a panic cuts every stream of the worker. What can be absent is an
//! `Option` here, and bytes stay bytes until they are known to be text.

use crate::headers::Headers;
use crate::replicas::Moment;
use proxy_wasm::hostcalls;
use proxy_wasm::types::{BufferType, LogLevel, MapType, MetricType};
use std::hash::{BuildHasher, Hasher};
use std::time::Duration;

#[link(wasm_import_module = "wasi_snapshot_preview1")]
#[expect(unsafe_code, reason = "std's Instant is monotonic but cannot be compared between VMs")]
unsafe extern "C" {
    fn clock_time_get(clock: u32, precision: u64, time: *mut u64) -> u16;
}

const MONOTONIC: u32 = 1;

#[link(wasm_import_module = "env")]
#[expect(unsafe_code, reason = "the SDK's binding panics on any status that it does not expect")]
unsafe extern "C" {
    fn proxy_continue_stream(stream: u32) -> u32;
    fn proxy_get_header_map_pairs(map: u32, bytes: *mut *mut u8, size: *mut usize) -> u32;
    fn proxy_get_metric(metric: u32, value: *mut u64) -> u32;
    fn proxy_set_property(
        path: *const u8,
        path_size: usize,
        value: *const u8,
        value_size: usize,
    ) -> u32;
    fn proxy_send_local_response(
        status: u32,
        details: *const u8,
        details_size: usize,
        body: *const u8,
        body_size: usize,
        headers: *const u8,
        headers_size: usize,
        grpc_status: i32,
    ) -> u32;
}

const HTTP_REQUEST: u32 = 0;

/// The monotonic clock, the same in every VM of this Envoy.
pub fn now() -> Moment {
    let mut nanos = 0;
    #[expect(unsafe_code, reason = "the host writes eight bytes to the place it is given")]
    let failed = unsafe { clock_time_get(MONOTONIC, 1, &raw mut nanos) };
    Moment(if failed == 0 { nanos } else { 0 })
}

/// Seconds since the epoch.
#[expect(clippy::disallowed_methods, reason = "this is the shell's one reading of that clock")]
pub fn wall_seconds() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// A number that no other VM has: the host seeds std's hasher at random in each.
pub fn unique_number() -> u64 {
    let mut hasher = std::hash::RandomState::new().build_hasher();
    hasher.write_u64(now().0);
    hasher.finish()
}

/// Bytes of this VM's linear memory.
pub fn memory_bytes() -> u64 {
    core::arch::wasm32::memory_size(0) as u64 * 65_536
}

/// A value of Envoy's shared data, and its compare-and-swap mark.
pub fn shared(key: &str) -> (Option<Vec<u8>>, Option<u32>) {
    hostcalls::get_shared_data(key).unwrap_or_default()
}

/// Writes a value. With a mark, only if it is still the one that was read.
pub fn set_shared(key: &str, value: &[u8], mark: Option<u32>) -> bool {
    hostcalls::set_shared_data(key, Some(value), mark).is_ok()
}

/// All headers of the request: one call, where each by itself would be one.
pub fn request_headers() -> Headers {
    headers(MapType::HttpRequestHeaders)
}

/// All headers of the response.
pub fn response_headers() -> Headers {
    headers(MapType::HttpResponseHeaders)
}

fn headers(map: MapType) -> Headers {
    let (mut bytes, mut size) = (std::ptr::null_mut(), 0);
    #[expect(
        unsafe_code,
        reason = "the host writes an address and a size to the places it is given"
    )]
    let status = unsafe { proxy_get_header_map_pairs(map as u32, &raw mut bytes, &raw mut size) };
    if status != 0 || bytes.is_null() {
        return Headers::default();
    }
    #[expect(
        unsafe_code,
        reason = "the host has had so many bytes allocated here, and filled them"
    )]
    Headers::new(unsafe { Vec::from_raw_parts(bytes, size, size) })
}

/// One value of a header of the request.
pub fn request_header(name: &str) -> Option<Vec<u8>> {
    hostcalls::get_map_value_bytes(MapType::HttpRequestHeaders, name).ok().flatten()
}

/// Removes every value of a header of the request.
pub fn remove_request_header(name: &str) {
    // The host answers this for a header that is not there, too.
    let _removed = hostcalls::remove_map_value(MapType::HttpRequestHeaders, name);
}

/// Sets a header of the request.
pub fn set_request_header(name: &str, value: &str) -> bool {
    hostcalls::set_map_value(MapType::HttpRequestHeaders, name, Some(value)).is_ok()
}

/// Removes every value of a header of the response.
pub fn remove_response_header(name: &str) {
    let _removed = hostcalls::remove_map_value(MapType::HttpResponseHeaders, name);
}

/// Sets a header of the response.
pub fn set_response_header(name: &str, value: &str) {
    let _set = hostcalls::set_map_value(MapType::HttpResponseHeaders, name, Some(value));
}

/// One value of a header of the answer to a call.
pub fn call_header(name: &str) -> Option<Vec<u8>> {
    hostcalls::get_map_value_bytes(MapType::HttpCallResponseHeaders, name).ok().flatten()
}

/// The first `size` bytes of the request's body held so far.
pub fn request_body(size: usize) -> Option<Vec<u8>> {
    buffer(BufferType::HttpRequestBody, size)
}

/// The first `size` bytes of the response's body in this callback.
pub fn response_body(size: usize) -> Option<Vec<u8>> {
    buffer(BufferType::HttpResponseBody, size)
}

/// The first `size` bytes of the answer to a call.
pub fn call_body(size: usize) -> Option<Vec<u8>> {
    buffer(BufferType::HttpCallResponseBody, size)
}

/// The plugin's configuration.
pub fn configuration(size: usize) -> Vec<u8> {
    buffer(BufferType::PluginConfiguration, size).unwrap_or_default()
}

fn buffer(kind: BufferType, size: usize) -> Option<Vec<u8>> {
    if size == 0 {
        return Some(Vec::new());
    }
    hostcalls::get_buffer(kind, 0, size).ok().flatten()
}

/// A property as text.
pub fn property(path: &[&str]) -> Option<String> {
    let bytes = hostcalls::get_property(path.to_vec()).ok().flatten()?;
    String::from_utf8(bytes).ok()
}

/// A property that is a whole number.
pub fn number_property(path: &[&str]) -> Option<u64> {
    let bytes = hostcalls::get_property(path.to_vec()).ok().flatten()?;
    Some(u64::from_le_bytes(bytes.try_into().ok()?))
}

/// Envoy's major and minor version.
pub fn envoy_version() -> Option<(u64, u64)> {
    let number = |name| {
        let path = ["xds", "node", "user_agent_build_version", "version", name];
        number_property(&path)
    };
    Some((number("major_number")?, number("minor_number")?))
}

/// Sets a value of this stream's filter state, which access logs can show: it is `wasm.` and this name there.
pub fn set_filter_state(name: &str, value: &str) {
    let (path, value) = (name.as_bytes(), value.as_bytes());
    #[expect(unsafe_code, reason = "the host reads what these point to, and copies it")]
    let _status =
        unsafe { proxy_set_property(path.as_ptr(), path.len(), value.as_ptr(), value.len()) };
}

/// Calls another cluster. The answer comes with the token that is returned.
pub fn call(
    cluster: &str,
    authority: &str,
    path: &str,
    headers: &[(&str, &str)],
    timeout: Duration,
) -> Option<u32> {
    let mut all = vec![(":method", "GET"), (":path", path), (":authority", authority)];
    all.extend_from_slice(headers);
    hostcalls::dispatch_http_call(cluster, all, None, Vec::new(), timeout).ok()
}

/// As [`call`], with a body of JSON.
pub fn post(
    cluster: &str,
    authority: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &[u8],
    timeout: Duration,
) -> Option<u32> {
    let mut all = vec![(":method", "POST"), (":path", path), (":authority", authority)];
    all.push(("content-type", "application/json"));
    all.extend_from_slice(headers);
    hostcalls::dispatch_http_call(cluster, all, Some(body), Vec::new(), timeout).ok()
}

/// Says something that is neither a warning nor an error.
pub fn log_info(message: &str) {
    let _logged = hostcalls::log(LogLevel::Info, message);
}

/// Makes the following calls be about this stream. False when there is no such stream (any more).
pub fn set_context(id: u32) -> bool {
    hostcalls::set_effective_context(id).is_ok()
}

/// Lets the request go on that a callback of its stream paused.
pub fn resume_request() {
    #[expect(unsafe_code, reason = "the host is given one number")]
    let _status = unsafe { proxy_continue_stream(HTTP_REQUEST) };
}

/// Answers the request in the place of a replica. Whether that will be.
pub fn answer(status: u16, headers: &[(&str, &str)], body: &[u8]) -> bool {
    let (headers, details) = (header_map(headers), b"warmpath_overloaded");
    #[expect(unsafe_code, reason = "the host reads what these point to, and copies it")]
    let status = unsafe {
        proxy_send_local_response(
            status.into(),
            details.as_ptr(),
            details.len(),
            body.as_ptr(),
            body.len(),
            headers.as_ptr(),
            headers.len(),
            NO_GRPC_STATUS,
        )
    };
    status == 0
}

const NO_GRPC_STATUS: i32 = -1;

/// Headers as the host reads them: their number, the lengths of each, then each with a zero behind it.
fn header_map(headers: &[(&str, &str)]) -> Vec<u8> {
    let length = |text: &str| u32::try_from(text.len()).unwrap_or(u32::MAX).to_le_bytes();
    let mut bytes = u32::try_from(headers.len()).unwrap_or(u32::MAX).to_le_bytes().to_vec();
    for (name, value) in headers {
        bytes.extend(length(name));
        bytes.extend(length(value));
    }
    for text in headers.iter().flat_map(|(name, value)| [name, value]) {
        bytes.extend(text.as_bytes());
        bytes.push(0);
    }
    bytes
}

/// Asks for a tick at this interval.
pub fn set_tick_period(period: Duration) {
    let _set = hostcalls::set_tick_period(period);
}

/// Defines a metric.
pub fn define_metric(kind: MetricType, name: &str) -> Option<u32> {
    hostcalls::define_metric(kind, name).ok()
}

/// Adds to a counter.
pub fn increment_metric(id: u32, by: u64) {
    // The host refuses an offset of zero or less.
    if let Some(by) = i64::try_from(by).ok().filter(|by| *by > 0) {
        let _incremented = hostcalls::increment_metric(id, by);
    }
}

/// What a counter or gauge stands at, over all VMs.
pub fn metric(id: u32) -> Option<u64> {
    let mut value = 0;
    #[expect(unsafe_code, reason = "the host writes eight bytes to the place it is given")]
    let status = unsafe { proxy_get_metric(id, &raw mut value) };
    (status == 0).then_some(value)
}

/// Sets a gauge, or adds a value to a histogram.
pub fn record_metric(id: u32, value: u64) {
    let _recorded = hostcalls::record_metric(id, value);
}
