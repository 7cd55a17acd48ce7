use crate::DType;

/// Everything that can go wrong. Each value names the argument, what was given and what is expected; it is returned
/// before anything is enqueued, and the outputs keep their bytes.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor has the wrong shape.
    #[error("`{argument}` has shape {got:?}, expected {expected:?} ([batch, heads, seq_len, dim])")]
    Shape {
        /// Name of the argument.
        argument: &'static str,
        /// Shape given.
        got: [usize; 4],
        /// Shape the problem asks for.
        expected: [usize; 4],
    },
    /// A tensor's strides do not fit.
    #[error("`{argument}` has {axis} stride {got}, expected {expected}")]
    Stride {
        /// Name of the argument.
        argument: &'static str,
        /// `batch`, `head` or `row`.
        axis: &'static str,
        /// Stride given, in elements.
        got: usize,
        /// What it must be.
        expected: &'static str,
    },
    /// A buffer ends before the tensor does.
    #[error("`{argument}` holds {got} elements, its shape and strides reach {expected}")]
    BufferTooShort {
        /// Name of the argument.
        argument: &'static str,
        /// Elements in the buffer.
        got: usize,
        /// Elements needed.
        expected: usize,
    },
    /// A pointer is null or not aligned.
    #[error("`{argument}` is at address {got:#x}, expected a non-null multiple of {expected}")]
    Alignment {
        /// Name of the argument.
        argument: &'static str,
        /// Address given.
        got: u64,
        /// Alignment needed, bytes.
        expected: usize,
    },
    /// Two tensors of which one is written share memory, or an output's rows overlap each other.
    #[error("output `{output}` overlaps `{other}`, expected disjoint memory")]
    Overlap {
        /// The output.
        output: &'static str,
        /// The other tensor, or the output itself.
        other: &'static str,
    },
    /// A tensor has another element type than the problem.
    #[error("`{argument}` holds {got}, expected {expected}")]
    ElementType {
        /// Name of the argument.
        argument: &'static str,
        /// Type given.
        got: DType,
        /// Type of the problem.
        expected: DType,
    },
    /// A dimension is out of range.
    #[error("`{argument}` is {got}, expected {expected}")]
    Dimension {
        /// Name of the argument.
        argument: &'static str,
        /// Value given.
        got: usize,
        /// Accepted values.
        expected: &'static str,
    },
    /// An element type that the backend has no kernel for.
    #[error("`dtype` is {got}, this backend takes {expected}")]
    UnsupportedElementType {
        /// Type asked for.
        got: DType,
        /// Types the backend takes.
        expected: &'static str,
    },
    /// A slope is negative, NaN or infinite.
    #[error("`slopes[{head}]` is {got}, expected a finite value >= 0")]
    Slope {
        /// Head index.
        head: usize,
        /// Value given.
        got: f32,
    },
    /// There are not as many slopes as heads.
    #[error("`slopes` has {got} values, expected one per head: {expected}")]
    SlopeCount {
        /// Values given.
        got: usize,
        /// Heads.
        expected: usize,
    },
    /// A layer index is not below the number of layers.
    #[error("`layer` is {got}, expected less than num_layers = {num_layers}")]
    Layer {
        /// Layer index given.
        got: usize,
        /// Number of layers given.
        num_layers: usize,
    },
    /// The scale is NaN or infinite.
    #[error("`scale` is {got}, expected a finite value")]
    Scale {
        /// Value given.
        got: f32,
    },
    /// No CUDA driver on this machine.
    #[error("no CUDA driver: {reason}")]
    NoDriver {
        /// What the loader or the driver said.
        reason: String,
    },
    /// A driver, but no device of that index.
    #[error("`device` is {got}, expected less than the number of CUDA devices, {count}")]
    NoDevice {
        /// Index asked for.
        got: usize,
        /// Devices there are.
        count: usize,
    },
    /// The device lacks what the kernels need.
    #[error("the device has compute capability {}.{}, expected at least {}.{}", got.0, got.1, expected.0, expected.1)]
    DeviceTooOld {
        /// Compute capability of the device.
        got: (u32, u32),
        /// The least one that a kernel exists for.
        expected: (u32, u32),
    },
    /// Device memory ran out.
    #[error("out of device memory: `{what}` needs {bytes} bytes")]
    OutOfMemory {
        /// What was to be allocated.
        what: &'static str,
        /// Its size.
        bytes: usize,
    },
    /// A pointer or a stream belongs to another CUDA context.
    #[error("`{argument}` belongs to another CUDA context than the engine")]
    WrongContext {
        /// Name of the argument.
        argument: &'static str,
    },
    /// An address is not that of device memory.
    #[error("`{argument}` is at address {address:#x}, expected device memory")]
    NotDeviceMemory {
        /// Name of the argument.
        argument: &'static str,
        /// Address given.
        address: u64,
    },
    /// The library was built without this kernel.
    #[error("kernel `{entry}` is not embedded in this build")]
    NoImage {
        /// Entry name of the kernel.
        entry: &'static str,
    },
    /// A driver call failed in a way that none of the above describes.
    #[error("{call} failed: {name} ({code})")]
    Driver {
        /// The driver call.
        call: &'static str,
        /// The driver's name for the error.
        name: String,
        /// The driver's code.
        code: u32,
    },
    /// The GPU's results differ from the CPU's.
    #[error("self-test: `{output}` differs from the CPU backend by {error:.2e}, expected at most {bound:.1e}")]
    SelfTest {
        /// The output.
        output: &'static str,
        /// Relative error, ‖x − ref‖ / ‖ref‖.
        error: f64,
        /// Its bound.
        bound: f64,
    },
}

/// `Result` with this crate's [`Error`].
pub type Result<T, E = Error> = core::result::Result<T, E>;
