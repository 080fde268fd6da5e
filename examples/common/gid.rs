//! GIDs as text.

use rdma_safe::Gid;

/// Formats all eight groups with all their digits, as sysfs does.
pub fn in_full(gid: Gid) -> String {
    let groups: Vec<String> = gid.0.chunks(2).map(|pair| format!("{:02x}{:02x}", pair[0], pair[1])).collect();
    groups.join(":")
}

#[cfg(test)]
mod tests {
    #[test]
    fn zeros_are_kept() {
        let gid = "fe80::2:ff:fe00:1".parse().unwrap();
        assert_eq!(super::in_full(gid), "fe80:0000:0000:0000:0002:00ff:fe00:0001");
    }
}
