//! Mock replica.
