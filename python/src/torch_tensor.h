// PyTorch tensors. torch is used only if already imported.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "tandem/tensor.h"

namespace tandem::python {

namespace nb = nanobind;

bool is_torch(nb::handle object);

// For objects that satisfy is_torch. All throw python_error if torch does.

/// True if autograd would miss computations on it.
bool loses_gradient(nb::handle object);
/// True if its memory has the opposite sign, as the imaginary part of a conjugate tensor.
bool is_negated(nb::handle object);
/// Views a strided CPU or GPU tensor through its attributes: a DLPack capsule takes several times
/// as long. False for any other tensor, which needs the capsule.
bool view_torch(nb::handle object, Tensor& tensor);
nb::object torch_capsule(nb::handle object);
/// True while torch.jit.trace runs on this thread.
bool is_traced();
/// Tells autograd of a write, so that a backward pass that saved the tensor raises instead of being
/// wrong.
void count_write(nb::handle object);

/// True if torch is imported, built with CUDA and has initialized it.
bool has_torch_streams();
/// This thread's current stream on that GPU, as a cudaStream_t. Throws python_error.
uintptr_t torch_stream(int device);

}  // namespace tandem::python
