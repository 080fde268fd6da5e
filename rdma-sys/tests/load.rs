//! Loading libraries, and the errors for missing ones. A loaded library stays for the life of a process, so each test
//! runs its work in a separate process: it starts this program again for that test alone.
#![allow(clippy::undocumented_unsafe_blocks)]

use std::ffi::{CStr, c_void};
use std::process::Command;
use std::ptr;

use rdma_sys::*;

const CHILD: &str = "RDMA_SYS_TEST_CHILD";
const NOWHERE: &str = "/nonexistent/libnothing.so";
const LIBC: &str = "libc.so.6";

/// Runs `work` in a process whose environment has `variables`, and no other variables of this crate.
fn in_new_process(test: &str, variables: &[(&str, &str)], work: fn()) {
    if std::env::var_os(CHILD).is_some() {
        return work();
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env_remove("RDMA_SYS_LIBIBVERBS")
        .env_remove("RDMA_SYS_LIBRDMACM")
        .env(CHILD, "1")
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && stdout.contains("1 passed"),
        "{stdout}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Finds a function for every name. No test calls one.
fn find_any(_: &CStr) -> *mut c_void {
    extern "C" fn never() {
        unreachable!("a test calls no function of the table");
    }
    never as *mut c_void
}

#[test]
fn a_missing_library_is_an_error_that_says_what_to_do() {
    let variables = [("RDMA_SYS_LIBIBVERBS", NOWHERE), ("RDMA_SYS_LIBRDMACM", NOWHERE)];
    in_new_process("a_missing_library_is_an_error_that_says_what_to_do", &variables, || {
        let error = verbs().unwrap_err();
        assert!(
            matches!(error, LoadError::Library { library: "libibverbs.so.1", tried, .. } if *tried == [NOWHERE]),
            "{error:?}"
        );
        let text = error.to_string();
        for word in [NOWHERE, "RDMA_SYS_LIBIBVERBS", "apt install libibverbs1", "dnf install libibverbs"] {
            assert!(text.contains(word), "{word} is not in {text}");
        }
        assert!(std::error::Error::source(error).is_none(), "the text includes the source, so a chain would repeat it");
        assert!(text.contains("cannot open shared object file"), "{text}");
        assert!(ptr::eq(error, verbs().unwrap_err()), "later calls return the same error");

        let error = rdmacm().unwrap_err();
        assert!(
            matches!(error, LoadError::Library { library: "librdmacm.so.1", tried, .. } if *tried == [NOWHERE]),
            "{error:?}"
        );
        let text = error.to_string();
        for word in [NOWHERE, "RDMA_SYS_LIBRDMACM", "apt install librdmacm1", "dnf install librdmacm"] {
            assert!(text.contains(word), "{word} is not in {text}");
        }
    });
}

#[test]
fn a_library_that_lacks_a_function_is_an_error_that_names_it() {
    let variables = [("RDMA_SYS_LIBIBVERBS", LIBC), ("RDMA_SYS_LIBRDMACM", LIBC)];
    in_new_process("a_library_that_lacks_a_function_is_an_error_that_names_it", &variables, || {
        let error = verbs().unwrap_err();
        assert!(
            matches!(error, LoadError::Symbol { library, name: "_ibv_query_gid_ex", since: 32, .. } if library == LIBC),
            "{error:?}"
        );
        let text = error.to_string();
        for word in [LIBC, "_ibv_query_gid_ex", "32", "rdma-core 44"] {
            assert!(text.contains(word), "{word} is not in {text}");
        }

        let error = rdmacm().unwrap_err();
        assert!(matches!(error, LoadError::Symbol { library, .. } if library == LIBC), "{error:?}");
    });
}

#[test]
fn without_an_override_the_soname_is_tried() {
    in_new_process("without_an_override_the_soname_is_tried", &[], || {
        match verbs() {
            Ok(verbs) => assert_eq!(unsafe { (verbs.ibv_rate_to_mult)(IBV_RATE_10_GBPS) }, 4),
            Err(LoadError::Library { tried, .. }) => assert_eq!(*tried, ["libibverbs.so.1"]),
            Err(error) => panic!("{error}"),
        }
        match rdmacm() {
            Ok(cm) => {
                let text = unsafe { CStr::from_ptr((cm.rdma_event_str)(RDMA_CM_EVENT_ESTABLISHED)) };
                assert_eq!(text, c"RDMA_CM_EVENT_ESTABLISHED");
            }
            Err(LoadError::Library { tried, .. }) => assert_eq!(*tried, ["librdmacm.so.1"]),
            Err(error) => panic!("{error}"),
        }
    });
}

#[test]
fn no_library_is_loaded_before_the_first_call() {
    in_new_process("no_library_is_loaded_before_the_first_call", &[], || {
        // A library that the program was linked with would be mapped by now, or the program would not have started.
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(maps.contains("libc.so"), "maps are readable");
        for library in ["libibverbs", "librdmacm"] {
            assert!(!maps.contains(library), "{library} is mapped:\n{maps}");
        }
    });
}

#[test]
fn an_installed_table_is_used_and_can_be_installed_once() {
    let variables = [("RDMA_SYS_LIBIBVERBS", NOWHERE), ("RDMA_SYS_LIBRDMACM", NOWHERE)];
    in_new_process("an_installed_table_is_used_and_can_be_installed_once", &variables, || unsafe {
        let table = Verbs::from_lookup("test", find_any).unwrap();
        install_verbs(table).unwrap();
        assert_eq!(verbs().unwrap().ibv_alloc_pd as usize, find_any(c"") as usize);
        let refused = install_verbs(table).unwrap_err();
        assert_eq!(refused.library, "libibverbs.so.1");
        assert!(refused.to_string().contains("before the first verb"), "{refused}");

        let table = RdmaCm::from_lookup("test", find_any).unwrap();
        install_rdmacm(table).unwrap();
        assert_eq!(rdmacm().unwrap().rdma_listen as usize, find_any(c"") as usize);
        assert_eq!(install_rdmacm(table).unwrap_err().library, "librdmacm.so.1");
    });
}

#[test]
fn a_table_cannot_be_installed_after_a_failed_load() {
    let variables = [("RDMA_SYS_LIBIBVERBS", NOWHERE), ("RDMA_SYS_LIBRDMACM", NOWHERE)];
    in_new_process("a_table_cannot_be_installed_after_a_failed_load", &variables, || unsafe {
        // Loading librdmacm has loaded libibverbs first.
        assert!(rdmacm().is_err());
        assert!(install_verbs(Verbs::from_lookup("test", find_any).unwrap()).is_err());
        assert!(install_rdmacm(RdmaCm::from_lookup("test", find_any).unwrap()).is_err());
        assert!(verbs().is_err());
    });
}

#[test]
fn functions_newer_than_the_floor_are_optional() {
    let newer = |name: &CStr| matches!(name.to_bytes(), b"ibv_reg_mr_ex" | b"_ibv_query_comp_cntr_caps");
    let table =
        unsafe { Verbs::from_lookup("test", |name| if newer(name) { ptr::null_mut() } else { find_any(name) }) }
            .unwrap();
    assert!(table.ibv_reg_mr_ex.is_none());
    assert!(table._ibv_query_comp_cntr_caps.is_none());
    assert!(table.ibv_alloc_dmah.is_some());

    let error = unsafe {
        RdmaCm::from_lookup("test", |name| if name == c"rdma_establish" { ptr::null_mut() } else { find_any(name) })
    }
    .unwrap_err();
    assert!(
        matches!(&error, LoadError::Symbol { library, name: "rdma_establish", since: 23, .. } if library == "test"),
        "{error:?}"
    );
}

/// Checks that the tables look up exactly the symbols that `symbols.tsv` lists.
#[test]
fn each_listed_symbol_is_looked_up_once() {
    fn sorted(mut names: Vec<String>) -> Vec<String> {
        names.sort_unstable();
        names
    }
    let mut asked = [Vec::new(), Vec::new()];
    let [verbs, cm] = &mut asked;
    unsafe {
        let note = |names: &mut Vec<String>, name: &CStr| {
            names.push(name.to_str().unwrap().to_owned());
            find_any(name)
        };
        Verbs::from_lookup("test", |name| note(verbs, name)).unwrap();
        RdmaCm::from_lookup("test", |name| note(cm, name)).unwrap();
    }
    let rows: Vec<&str> = include_str!("../symbols.tsv").lines().filter(|line| !line.starts_with('#')).collect();
    for (library, asked) in ["libibverbs.so.1", "librdmacm.so.1"].into_iter().zip(asked) {
        let of = |row: &&str| row.strip_prefix(library)?.split('\t').nth(1).map(str::to_owned);
        let listed: Vec<String> = rows.iter().filter_map(of).collect();
        assert!(listed.len() > 70, "{library} has {} symbols", listed.len());
        assert_eq!(sorted(asked), sorted(listed), "{library}");
    }
}

#[test]
fn without_a_library_shims_report_that_the_verb_is_not_supported() {
    let variables = [("RDMA_SYS_LIBIBVERBS", NOWHERE)];
    in_new_process("without_a_library_shims_report_that_the_verb_is_not_supported", &variables, || unsafe {
        let errno = || *libc::__errno_location();
        let clear = || *libc::__errno_location() = 0;
        let mut context = ibv_context::zeroed();
        let mut pd = ibv_pd { context: &mut context, ..ibv_pd::zeroed() };
        let mut data = [0_u8; 8];

        // A positive errno.
        let mut port = ibv_port_attr { lid: 7, ..ibv_port_attr::zeroed() };
        assert_eq!(ibv_query_port(&mut context, 1, &mut port), libc::EOPNOTSUPP);
        assert_eq!(port.lid, 0);
        let mut entry = ibv_gid_entry::zeroed();
        assert_eq!(ibv_query_gid_ex(&mut context, 1, 0, &mut entry, 0), libc::EOPNOTSUPP);
        let mut device = ibv_device_attr_ex::zeroed();
        assert_eq!(ibv_query_device_ex(&mut context, ptr::null(), &mut device), libc::EOPNOTSUPP);
        let mut caps = ibv_comp_cntr_caps::zeroed();
        assert_eq!(ibv_query_comp_cntr_caps(&mut context, &mut caps), libc::EOPNOTSUPP);

        // A negative one.
        let refused = -libc::EOPNOTSUPP as isize;
        assert_eq!(ibv_query_gid_table(&mut context, &mut entry, 1, 0), refused);

        // Null and errno.
        clear();
        let mut qp =
            ibv_qp_init_attr_ex { comp_mask: IBV_QP_INIT_ATTR_PD.0, pd: &mut pd, ..ibv_qp_init_attr_ex::zeroed() };
        assert!(ibv_create_qp_ex(&mut context, &mut qp).is_null());
        assert_eq!(errno(), libc::EOPNOTSUPP);
        clear();
        let mut srq =
            ibv_srq_init_attr_ex { comp_mask: IBV_SRQ_INIT_ATTR_PD.0, pd: &mut pd, ..ibv_srq_init_attr_ex::zeroed() };
        assert!(ibv_create_srq_ex(&mut context, &mut srq).is_null());
        assert_eq!(errno(), libc::EOPNOTSUPP);
        clear();
        assert!(ibv_reg_mr(&mut pd, data.as_mut_ptr().cast(), 8, 0).is_null());
        assert_eq!(errno(), libc::EOPNOTSUPP);
        clear();
        assert!(ibv_reg_mr_iova(&mut pd, data.as_mut_ptr().cast(), 8, 0, 0).is_null());
        assert_eq!(errno(), libc::EOPNOTSUPP);

        // -1 and errno.
        clear();
        assert_eq!(rdma_dereg_mr(ptr::null_mut()), -1);
        assert_eq!(errno(), libc::EOPNOTSUPP);
    });
}

#[test]
fn errors_cross_threads() {
    fn crosses<T: Send + Sync + 'static>() {}
    crosses::<LoadError>();
    crosses::<AlreadyLoaded>();
    crosses::<Verbs>();
    crosses::<RdmaCm>();
}
