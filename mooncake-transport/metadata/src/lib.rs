#![doc = include_str!("../README.md")]
#![cfg_attr(docsrs, feature(doc_cfg))]
#![deny(unsafe_code)]

#[cfg(feature = "metadata-etcd")]
pub mod etcd;
#[cfg(feature = "metadata-http")]
pub mod http;
#[cfg(feature = "http-server")]
pub mod http_routes;
#[cfg(feature = "metadata-redis")]
pub mod redis;
#[cfg(feature = "metadata-rocksdb")]
pub mod rocksdb;
mod services;
mod settings;
mod token;
#[cfg(any(feature = "metadata-http", feature = "metadata-etcd"))]
mod web;

pub use services::{connect, open_etcd, open_folder};
pub use settings::{DirectoryOptions, FOLDER, P2P, RedisLogin};
pub use token::HttpToken;
