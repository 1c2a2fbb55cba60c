//! Network addresses of this machine.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener};

/// Addresses of all interfaces that are up, those that other machines can reach first.
pub(crate) fn of_this_machine() -> Vec<IpAddr> {
    let mut addresses = interfaces();
    if addresses.is_empty() {
        addresses.push(IpAddr::V4(Ipv4Addr::LOCALHOST));
    }
    addresses.sort_by_key(|address| (address.is_loopback(), address.is_ipv6()));
    addresses.dedup();
    addresses
}

fn interfaces() -> Vec<IpAddr> {
    let mut first: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: the list is written to a valid pointer, and only used if the call succeeded.
    if unsafe { libc::getifaddrs(&raw mut first) } != 0 {
        return Vec::new();
    }
    let (mut addresses, mut next) = (Vec::new(), first);
    // SAFETY: the list is ours until it is freed below; each entry is valid and its link leads to the next or to null.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        if entry.ifa_flags & libc::IFF_UP as u32 != 0 {
            // SAFETY: the address of an entry of the list.
            addresses.extend(unsafe { address(entry.ifa_addr) });
        }
    }
    // SAFETY: the list came from `getifaddrs`, and nothing points into it any more.
    unsafe { libc::freeifaddrs(first) };
    addresses
}

/// # Safety
/// The pointer is null or that of a socket address as long as its family says.
unsafe fn address(socket: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: by the contract.
    let family = i32::from(unsafe { socket.as_ref() }?.sa_family);
    match family {
        libc::AF_INET => {
            // SAFETY: the family says that it is this type; a copy needs no alignment.
            let v4 = unsafe { socket.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(IpAddr::V4(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr))))
        }
        libc::AF_INET6 => {
            // SAFETY: as above.
            let v6 = unsafe { socket.cast::<libc::sockaddr_in6>().read_unaligned() };
            let v6 = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            // Usable only together with an interface's number.
            (!v6.is_unicast_link_local()).then_some(IpAddr::V6(v6))
        }
        _ => None,
    }
}

/// Listens on every address, IPv6 and IPv4 where the system has both.
pub(crate) fn listen(port: u16) -> std::io::Result<TcpListener> {
    TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).or_else(|error| match error.kind() {
        std::io::ErrorKind::AddrInUse => Err(error),
        _ => TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_can_reach_itself_at_each_of_its_addresses() {
        let listener = listen(0).expect("a port");
        let port = listener.local_addr().expect("its number").port();
        let addresses = of_this_machine();
        assert!(addresses.iter().any(IpAddr::is_loopback), "{addresses:?}");
        for address in addresses.iter().filter(|address| address.is_ipv4()) {
            std::net::TcpStream::connect((*address, port)).unwrap_or_else(|e| panic!("{address}: {e}"));
        }
    }
}
