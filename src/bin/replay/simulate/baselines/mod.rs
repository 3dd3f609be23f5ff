//! What Warmpath is compared with: Envoy's own policies, and the published rules of those who route by caches.
//!
//! Each rule is told by what its authors publish, at their defaults, in words and code of ours; a file's head says
//! where that is, and what the simulation cannot show of it. The rule of fairness: a baseline gets every signal its real
//! counterpart has, and where the simulation must take a side, the baseline's.
//!
//! - Tokens are exact for all, though most peers estimate them from bytes or match characters.
//! - KV events arrive when the step ends that caused them, in order and complete.
//! - Who scrapes more often than the fleet reports gets reports as often.
//! - What remembers where it sent what forgets as a cache of the replica's true size would, and is told of restarts,
//!   also where its counterpart is not.
//! - An engine's rate of prefill is told to who has an operator measure it.
//! - One process serves all threads of a gateway where the counterpart is a process of its own.
//!
//! It is not fair in this: a hop to another process and the tokenizing there take no time; nor does a gateway of theirs
//! ever fail. And where a threshold is meant to be tuned to the model, as vllm-project/router's, it is not.

pub mod active;
pub mod choice;
pub mod dynamo;
pub mod estimated;
pub mod flights;
pub mod held;
pub mod holders;
pub mod least_request;
pub mod llm_d;
pub mod prefix_only;
pub mod random;
pub mod ring_hash;
pub mod round_robin;
pub mod smg;
mod span;
pub mod vllm_router;

#[cfg(test)]
pub mod desk;
