//! The GID table, which maps each index to an address of the device.

use rdma_sys::*;

use crate::device::{Device, gid};

/// Minimum number of entries.
///
/// RoCE drivers list each address for RoCE v1 and then for RoCE v2. Some programs rely on that and use index 1 without checking
/// its type. A device with one address therefore lists it at both indices.
const MIN_ENTRIES: usize = 2;

/// Number of entries of a device with `links` addresses.
pub(super) fn len(links: usize) -> usize {
    links.max(MIN_ENTRIES)
}

/// Index of the address that a GID index stands for.
pub(super) fn link_at(index: usize, links: usize) -> Option<usize> {
    (index < len(links)).then_some(if index < links { index } else { 0 })
}

/// Returns an entry of the table.
pub(super) fn entry(device: &Device, index: u32) -> Option<ibv_gid_entry> {
    let core = device.lock();
    let link = link_at(index as usize, core.links.len())?;
    let socket = &core.links.get(link)?.socket;
    Some(ibv_gid_entry {
        gid: ibv_gid { raw: gid(socket.address()) },
        gid_index: index,
        port_num: 1,
        gid_type: IBV_GID_TYPE_ROCE_V2.0,
        ndev_ifindex: socket.interface(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_address_has_two_entries_and_each_of_several_has_one() {
        let table = |links| (0..4).map(|index| link_at(index, links)).collect::<Vec<_>>();
        assert_eq!((len(1), table(1)), (2, vec![Some(0), Some(0), None, None]));
        assert_eq!((len(2), table(2)), (2, vec![Some(0), Some(1), None, None]));
        assert_eq!((len(3), table(3)), (3, vec![Some(0), Some(1), Some(2), None]));
    }
}
