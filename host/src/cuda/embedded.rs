//! The kernels in this crate, and which form of one a device takes.
//!
//! The build script writes the table from `ptx/`. A cubin loads in a fraction of a millisecond; PTX is what is left
//! for devices that have no cubin here, and the driver compiles it at first use.

use std::ffi::CStr;

/// What to hand to the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Image {
    /// Machine code for this very device.
    Cubin(&'static [u8]),
    /// Source for the driver's compiler.
    Ptx(&'static CStr),
}

/// One kernel of `ptx/`.
struct Kernel {
    entry: &'static str,
    target: Target,
    /// NUL-terminated. Made a C string at run time: in a constant the compiler would walk it byte by byte.
    ptx: &'static str,
    cubins: &'static [(Target, &'static [u8])],
}

/// What PTX or a cubin was made for, as in `sm_90a`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Target {
    major: u32,
    minor: u32,
    /// Uses instructions of this architecture alone (suffix `a`).
    exact: bool,
}

/// Tegra devices, which take no cubin made for a discrete one, whatever the numbers say.
const TEGRA: (u32, u32) = (8, 7);

impl Target {
    const fn parse(name: &str) -> Self {
        let [b's', b'm', b'_', digits @ ..] = name.as_bytes() else { panic!("a target is named sm_…") };
        let (mut number, mut i) = (0, 0);
        while i < digits.len() && digits[i].is_ascii_digit() {
            number = number * 10 + (digits[i] - b'0') as u32;
            i += 1;
        }
        let exact = match digits.len() - i {
            0 => false,
            1 if digits[i] == b'a' => true,
            _ => panic!("a target is named by digits and at most an `a`"),
        };
        Self { major: number / 10, minor: number % 10, exact }
    }

    /// Machine code for `self` runs on the device.
    fn code_runs_on(self, device: (u32, u32)) -> bool {
        let same = device == (self.major, self.minor);
        let later_minor = device.0 == self.major && device.1 > self.minor;
        same || (later_minor && !self.exact && device != TEGRA)
    }

    /// The driver can compile PTX for `self` on the device.
    fn ptx_runs_on(self, device: (u32, u32)) -> bool {
        let same = device == (self.major, self.minor);
        same || (!self.exact && device > (self.major, self.minor))
    }
}

/// The form of a kernel for a device of this compute capability; `None` where there is none.
#[cfg(feature = "cuda")]
pub(crate) fn image(entry: &str, capability: (u32, u32)) -> Option<Image> {
    choose(KERNELS, entry, capability)
}

fn choose(kernels: &[Kernel], entry: &str, capability: (u32, u32)) -> Option<Image> {
    let kernel = kernels.iter().find(|kernel| kernel.entry == entry)?;
    let cubins = kernel.cubins.iter().filter(|(target, _)| target.code_runs_on(capability));
    if let Some((_, code)) = cubins.max_by_key(|(target, _)| target.minor) {
        return Some(Image::Cubin(code));
    }
    let ptx = CStr::from_bytes_with_nul(kernel.ptx.as_bytes()).ok()?;
    kernel.target.ptx_runs_on(capability).then_some(Image::Ptx(ptx))
}

#[cfg(feature = "cuda")]
include!(concat!(env!("OUT_DIR"), "/embedded.rs"));

/// Cubins are ELF files: the driver may read them in words.
#[cfg(feature = "cuda")]
#[repr(C, align(16))]
struct Aligned<const LEN: usize>([u8; LEN]);

#[cfg(test)]
mod tests {
    use super::*;

    const PTX: &str = "source\0";
    const KERNELS_OF_THE_TEST: &[Kernel] = &[
        Kernel {
            entry: "portable",
            target: Target::parse("sm_80"),
            ptx: PTX,
            cubins: &[
                (Target::parse("sm_90a"), b"90a"),
                (Target::parse("sm_80"), b"80"),
                (Target::parse("sm_86"), b"86"),
                (Target::parse("sm_120"), b"120"),
            ],
        },
        Kernel { entry: "bare", target: Target::parse("sm_80"), ptx: PTX, cubins: &[] },
        Kernel { entry: "hopper", target: Target::parse("sm_90a"), ptx: PTX, cubins: &[] },
    ];

    #[test]
    fn names_are_parsed() {
        assert_eq!(Target::parse("sm_86"), Target { major: 8, minor: 6, exact: false });
        assert_eq!(Target::parse("sm_100a"), Target { major: 10, minor: 0, exact: true });
    }

    #[test]
    fn the_closest_form_is_chosen() {
        let cubin = |code: &'static str| Some(Image::Cubin(code.as_bytes()));
        let ptx = Some(Image::Ptx(c"source"));
        let cases = [
            ("portable", (7, 5), None),
            ("portable", (8, 0), cubin("80")),
            ("portable", (8, 6), cubin("86")),
            ("portable", (8, 7), ptx),
            ("portable", (8, 9), cubin("86")),
            ("portable", (9, 0), cubin("90a")),
            ("portable", (10, 0), ptx),
            ("portable", (12, 1), cubin("120")),
            ("bare", (7, 5), None),
            ("bare", (8, 0), ptx),
            ("bare", (12, 0), ptx),
            ("hopper", (8, 9), None),
            ("hopper", (9, 0), ptx),
            ("hopper", (10, 0), None),
            ("absent", (9, 0), None),
        ];
        for (entry, capability, expected) in cases {
            assert_eq!(choose(KERNELS_OF_THE_TEST, entry, capability), expected, "{entry} on {capability:?}");
        }
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn every_variant_has_a_hopper_cubin_and_ptx() {
        for variant in lightning_attention_kernels::variants::VARIANTS {
            let hopper = image(variant.entry, (9, 0));
            assert!(matches!(hopper, Some(Image::Cubin(code)) if code.starts_with(b"\x7fELF")), "{}", variant.entry);
            let future = image(variant.entry, (99, 0));
            let portable = variant.arch == lightning_attention_kernels::variants::Arch::Sm80;
            assert_eq!(matches!(future, Some(Image::Ptx(_))), portable, "{}", variant.entry);
        }
    }
}
