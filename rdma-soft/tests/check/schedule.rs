//! Random schedules of regions that come and go: no byte moves through a stale translation, and each attempt is reported.

use rdma_soft::abi::ibv_dereg_mr;
use rdma_soft::check::Kind;
use rdma_sys::*;

use crate::world::{ALL, Memory, World};

const PAGE: usize = 4096;
const PAGES: usize = 4;
const STEPS: u64 = 24;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % limit
    }

    /// Offset and length of a slice of a page.
    fn slice(&mut self) -> (u64, u32) {
        let offset = self.below(PAGE as u64);
        (offset, 1 + self.below(PAGE as u64 - offset) as u32)
    }
}

/// A page that is registered at times.
struct Page {
    address: u64,
    /// Expected content.
    content: Vec<u8>,
    region: Option<Memory>,
    /// The last region, which was deregistered.
    stale: Option<Memory>,
    is_mapped: bool,
}

impl Page {
    /// Replaces the page by a new one of zeros, or by one that is not accessible.
    fn map(&mut self, is_accessible: bool) {
        let protection = if is_accessible { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_NONE };
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | if self.address == 0 { 0 } else { libc::MAP_FIXED };
        // SAFETY: the mapping replaces at most a page of this test, to which it has no reference.
        let at = unsafe { libc::mmap(self.address as *mut _, PAGE, protection, flags, -1, 0) };
        assert_ne!(at, libc::MAP_FAILED);
        (self.address, self.is_mapped) = (at as u64, is_accessible);
        self.content.fill(0);
    }

    fn check(&self, context: &str) {
        if self.is_mapped {
            // SAFETY: the page is mapped, and no work in flight uses it.
            let found = unsafe { std::slice::from_raw_parts(self.address as *const u8, PAGE) };
            assert!(found == self.content, "{context}: a byte has moved that should not");
        }
    }
}

/// A schedule and its world.
struct Schedule {
    world: World,
    pages: Vec<Page>,
    source: Memory,
    random: Random,
    context: String,
}

impl Schedule {
    fn new() -> Schedule {
        let mut world = World::with("limit=1000000".parse().unwrap(), 16);
        let source = world.memory(PAGE as u32);
        let page = || Page { address: 0, content: vec![0; PAGE], region: None, stale: None, is_mapped: false };
        let mut pages: Vec<Page> = std::iter::repeat_with(page).take(PAGES).collect();
        pages.iter_mut().for_each(|page| page.map(true));
        Schedule { world, pages, source, random: Random(0), context: String::new() }
    }

    /// Fills the source with a new value.
    fn fill_source(&mut self) -> u8 {
        let byte = 1 + self.random.below(255) as u8;
        (0..PAGE).for_each(|at| self.source.write(at, byte));
        byte
    }

    fn source(&self, len: u32) -> ibv_sge {
        ibv_sge { length: len, ..self.source.sge() }
    }

    /// Expects reports of these kinds, after which the queue pairs are connected again.
    fn expect(&self, kinds: &[Kind]) {
        let reports = self.world.reports();
        let found: Vec<Kind> = reports.iter().map(|report| report.kind).collect();
        assert_eq!(found, kinds, "{}: {reports:#?}", self.context);
        if !kinds.is_empty() {
            self.world.reconnect();
        }
    }

    fn register(&mut self, page: usize) {
        let address = self.pages[page].address;
        if self.pages[page].region.is_none() && self.pages[page].is_mapped {
            // SAFETY: the page is mapped.
            let region = unsafe { self.world.register(self.world.pd, address, PAGE as u32, ALL) };
            self.pages[page].region = Some(region);
        }
    }

    fn deregister(&mut self, page: usize) {
        let page = &mut self.pages[page];
        if let Some(region) = page.region.take() {
            // SAFETY: the region exists. Only its keys are used again.
            assert_eq!(unsafe { ibv_dereg_mr(region.mr) }, 0);
            page.stale = Some(region);
        }
    }

    /// Lets the peer write a slice of a page by the key of a region.
    fn write(&mut self, page: usize, region: Option<Memory>, failure: Option<Kind>) {
        let Some(region) = region else { return };
        let (byte, (offset, len)) = (self.fill_source(), self.random.slice());
        let remote = (region.address + offset, region.key);
        self.world.post(7, self.source(len), IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED, remote);
        let status = self.world.sent();
        match failure {
            None => {
                assert_eq!(status, IBV_WC_SUCCESS, "{}", self.context);
                self.pages[page].content[offset as usize..][..len as usize].fill(byte);
                self.expect(&[]);
            }
            Some(kind) => {
                assert_eq!(status, IBV_WC_REM_ACCESS_ERR, "{}", self.context);
                self.expect(&[kind]);
            }
        }
    }

    /// Sends a message to a slice of a page.
    fn send(&mut self, page: usize, region: Option<Memory>, failure: Option<Kind>) {
        let Some(region) = region else { return };
        let (byte, (offset, len)) = (self.fill_source(), self.random.slice());
        self.world.receive(8, ibv_sge { addr: region.address + offset, length: len, lkey: region.key });
        self.world.send(7, self.source(len));
        let status = self.world.received();
        match failure {
            None => {
                assert_eq!((status, self.world.sent()), (IBV_WC_SUCCESS, IBV_WC_SUCCESS), "{}", self.context);
                self.pages[page].content[offset as usize..][..len as usize].fill(byte);
                self.expect(&[]);
            }
            Some(kind) => {
                assert_eq!(status, IBV_WC_LOC_PROT_ERR, "{}", self.context);
                assert_ne!(self.world.sent(), IBV_WC_SUCCESS, "{}", self.context);
                self.expect(&[kind]);
            }
        }
    }

    /// A child cannot use the device, and what it releases stays valid in the parent.
    fn fork(&self) {
        // SAFETY: the child calls only functions of the device, which fail at once, and ends without returning.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: the region exists in the parent.
            let failed = unsafe { ibv_dereg_mr(self.source.mr) } == libc::ENODEV;
            // SAFETY: as above.
            unsafe { libc::_exit(if failed { 0 } else { 1 }) };
        }
        let mut status = 0;
        // SAFETY: the child exists.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "{}", self.context);
    }

    fn step(&mut self) {
        let page = self.random.below(PAGES as u64) as usize;
        let Page { region, stale, is_mapped, .. } = self.pages[page];
        let unmapped = (!is_mapped).then_some(Kind::Unmapped);
        match self.random.below(40) {
            0..10 => self.register(page),
            10..14 => self.deregister(page),
            14..20 => self.write(page, region, unmapped),
            20..26 => self.send(page, region, unmapped),
            26..29 => self.write(page, stale, Some(Kind::StaleKey)),
            29..32 => self.send(page, stale, Some(Kind::StaleKey)),
            32..35 => self.pages[page].map(false),
            // Memory comes back only for a region that does not translate to it any more.
            35..39 => {
                self.deregister(page);
                self.pages[page].map(true);
            }
            _ => self.fork(),
        }
        self.pages.iter().for_each(|page| page.check(&self.context));
    }

    fn run(&mut self, seed: u64) {
        self.random = Random(seed);
        for step in 0..STEPS {
            self.context = format!("seed {seed}, step {step}");
            self.step();
        }
        for page in 0..PAGES {
            self.deregister(page);
            let page = &mut self.pages[page];
            page.stale = None;
            page.map(true);
        }
    }
}

impl Drop for Schedule {
    fn drop(&mut self) {
        for page in &self.pages {
            // SAFETY: the page is mapped, and nothing refers to it any more.
            unsafe { libc::munmap(page.address as *mut _, PAGE) };
        }
    }
}

/// The number of schedules: 100, or `RDMA_SOFT_SCHEDULES`. A seed that fails is replayed with `RDMA_SOFT_FIRST_SCHEDULE`.
#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn no_byte_moves_through_a_stale_translation() {
    let number = |name: &str, default: u64| std::env::var(name).map_or(default, |text| text.parse().unwrap());
    let first = number("RDMA_SOFT_FIRST_SCHEDULE", 1);
    let mut schedule = Schedule::new();
    for seed in first..first + number("RDMA_SOFT_SCHEDULES", 100) {
        schedule.run(seed);
    }
    assert!(schedule.pages.iter().all(|page| page.is_mapped && page.region.is_none()));
}

#[test]
#[cfg_attr(miri, ignore = "it opens sockets")]
fn a_schedule_that_moves_a_byte_is_noticed() {
    let mut schedule = Schedule::new();
    schedule.context = "on purpose".to_owned();
    schedule.register(0);
    let (region, before) = (schedule.pages[0].region, schedule.pages[0].content.clone());
    schedule.write(0, region, None);
    assert_ne!(schedule.pages[0].content, before);
    schedule.pages[0].content = before;
    let page = &schedule.pages[0];
    assert!(std::panic::catch_unwind(|| page.check("on purpose")).is_err());
}
