//! Where a live page is served: a port, a host, or both.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::str::FromStr;

/// Port of a live page where none is given.
pub const PAGE_PORT: u16 = 8420;

/// Address of a live page, as typed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageAddress {
    /// An IP address or a name of this machine.
    host: String,
    /// 0 is any that is free.
    port: u16,
}

impl Default for PageAddress {
    fn default() -> Self {
        PageAddress { host: LOOPBACK.into(), port: PAGE_PORT }
    }
}

const LOOPBACK: &str = "127.0.0.1";
const WANTED: &str =
    "is no address: give a port, a host, or both, such as 9999, localhost:8433 or 0.0.0.0:8420";

impl FromStr for PageAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let page = |host: &str, port| PageAddress { host: host.to_string(), port };
        if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
            return Ok(page(LOOPBACK, port(text)?));
        }
        if let Ok(ip) = unbracketed(text).parse::<IpAddr>() {
            return Ok(page(&ip.to_string(), PAGE_PORT));
        }
        let Some((host, digits)) = text.rsplit_once(':') else {
            // Any other word without a port is more likely a mistake than a host.
            return if text.eq_ignore_ascii_case("localhost") {
                Ok(page("localhost", PAGE_PORT))
            } else {
                Err(WANTED.into())
            };
        };
        let ip = unbracketed(host).parse::<IpAddr>().map(|ip| ip.to_string());
        let is_name = |host: &str| {
            !host.is_empty() && host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b))
        };
        match ip {
            Ok(ip) => Ok(page(&ip, port(digits)?)),
            Err(_) if is_name(host) => Ok(page(host, port(digits)?)),
            Err(_) => Err(WANTED.into()),
        }
    }
}

fn unbracketed(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

fn port(digits: &str) -> Result<u16, String> {
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(WANTED.into());
    }
    digits.parse().map_err(|_| "is no address: a port is at most 65535".to_string())
}

impl fmt::Display for PageAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PageAddress { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

/// Addresses to try, the first one first. Both loopbacks are `localhost`, the older one first: tunnels and browsers try that one always.
impl ToSocketAddrs for PageAddress {
    type Iter = std::vec::IntoIter<SocketAddr>;

    fn to_socket_addrs(&self) -> io::Result<Self::Iter> {
        if self.host.eq_ignore_ascii_case("localhost") {
            let both = [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)];
            return Ok(both.map(|ip| SocketAddr::new(ip, self.port)).to_vec().into_iter());
        }
        (self.host.as_str(), self.port).to_socket_addrs()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_a_host_or_both_are_an_address() {
        let cases = [
            ("9999", "127.0.0.1:9999"),
            ("0", "127.0.0.1:0"),
            ("localhost", "localhost:8420"),
            ("localhost:8433", "localhost:8433"),
            ("127.0.0.1", "127.0.0.1:8420"),
            ("0.0.0.0:80", "0.0.0.0:80"),
            ("::1", "[::1]:8420"),
            ("[::1]:7", "[::1]:7"),
            ("gpu-7.cluster:8420", "gpu-7.cluster:8420"),
        ];
        for (typed, shown) in cases {
            let page: PageAddress = typed.parse().unwrap();
            assert_eq!(page.to_string(), shown);
            assert_eq!(shown.parse(), Ok(page), "{typed}");
        }
        for bad in [
            "",
            "quick",
            ":8420",
            "host:",
            "host:x",
            "a b:1",
            "http://localhost:1",
            "-1",
            "1.5",
            "[::1]:x",
            "localhost:+1",
        ] {
            assert_eq!(bad.parse::<PageAddress>().unwrap_err(), WANTED, "{bad}");
        }
        for bad in ["65536", "localhost:99999999999"] {
            assert!(bad.parse::<PageAddress>().unwrap_err().contains("at most 65535"), "{bad}");
        }
        let local: PageAddress = "localhost:5".parse().unwrap();
        let addresses: Vec<String> = local.to_socket_addrs().unwrap().map(|a| a.to_string()).collect();
        assert_eq!(addresses, ["127.0.0.1:5", "[::1]:5"]);
    }
}
