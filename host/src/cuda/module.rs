//! Kernels in a context: each variant's image is loaded when it is first asked for, and never before.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cust::module::Module;
use cust::sys::CUfunction;
use lightning_attention_kernels::variants::{VARIANTS, Variant};

use super::driver::{self, Context};
use super::embedded::{self, Image};
use crate::{Error, Result};

/// A loaded kernel. Valid as long as the [`Modules`] it came from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kernel {
    pub(super) variant: &'static Variant,
    pub(super) function: CUfunction,
}

// SAFETY: a function handle may be used from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// How long a kernel took to load: some 0.1 ms from machine code, 0.2 s where the driver compiles PTX.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadTime {
    /// Entry name of the kernel.
    pub entry: &'static str,
    /// Time of loading it.
    pub time: Duration,
    /// Whether it was loaded as machine code; otherwise the driver compiled PTX.
    pub machine_code: bool,
}

#[derive(Debug)]
struct Loaded {
    module: Module,
    kernel: Kernel,
    load_time: LoadTime,
}

/// The kernels loaded in one context.
#[derive(Debug)]
pub(super) struct Modules {
    context: Arc<Context>,
    capability: (u32, u32),
    loaded: Mutex<Vec<Loaded>>,
}

impl Modules {
    pub(super) fn new(context: Arc<Context>, capability: (u32, u32)) -> Self {
        Modules { context, capability, loaded: Mutex::new(Vec::with_capacity(VARIANTS.len())) }
    }

    /// The kernel of `variant`, loaded now unless it already was.
    pub(super) fn kernel(&self, variant: &'static Variant) -> Result<Kernel> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = loaded.iter().find(|l| l.kernel.variant.entry == variant.entry) {
            return Ok(found.kernel);
        }
        let new = self.context.with(|| load(variant, self.capability))?;
        let kernel = new.kernel;
        loaded.push(new);
        Ok(kernel)
    }

    pub(super) fn load_times(&self) -> Vec<LoadTime> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner).iter().map(|l| l.load_time).collect()
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        let loaded = self.loaded.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = self.context.with(|| {
            for entry in loaded.drain(..) {
                drop(entry.module);
            }
            Ok(())
        });
        // Where the context is gone, so are its modules.
        loaded.drain(..).for_each(|entry| core::mem::forget(entry.module));
    }
}

fn load(variant: &'static Variant, capability: (u32, u32)) -> Result<Loaded> {
    let start = Instant::now();
    let image = embedded::image(variant.entry, capability).ok_or(Error::NoImage { entry: variant.entry })?;
    let (module, machine_code) = match image {
        Image::Cubin(bytes) => (Module::from_cubin(bytes, &[]), true),
        Image::Ptx(text) => (Module::from_ptx_cstr(text, &[]), false),
    };
    let module = module.map_err(driver::from_cust("cuModuleLoadDataEx"))?;
    let function = module.get_function(variant.entry).map_err(driver::from_cust("cuModuleGetFunction"))?.to_raw();
    // SAFETY: the function was just found in a loaded module.
    unsafe { driver::set_max_shared_bytes(function, variant.shared_bytes)? };
    let load_time = LoadTime { entry: variant.entry, time: start.elapsed(), machine_code };
    Ok(Loaded { module, kernel: Kernel { variant, function }, load_time })
}
