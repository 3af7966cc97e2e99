// PyTorch's tensors, of which torch is asked only where somebody has imported it.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

#include "tandem/tensor.h"

namespace tandem::python {

namespace nb = nanobind;

bool is_torch(nb::handle object);

// Of what is_torch. All throw python_error where torch does.

/// Whether autograd would be told nothing of what is computed with it.
bool loses_gradient(nb::handle object);
/// Whether its memory has the other signs, as the imaginary part of a conjugate's has.
bool is_negated(nb::handle object);
/// A plain tensor on the CPU or a GPU as it lies, by its attributes: a DLPack capsule takes several
/// times as long. False for any other, of which the capsule says more.
bool view_torch(nb::handle object, Tensor& tensor);
nb::object torch_capsule(nb::handle object);
/// Whether torch.jit.trace runs on this thread.
bool is_traced();
/// Tells autograd that it was written: a backward pass that kept it is refused then, not wrong.
void count_write(nb::handle object);

/// Whether torch is there, built with CUDA and in use of it.
bool has_torch_streams();
/// This thread's current stream of that GPU, as a cudaStream_t. Throws python_error.
uintptr_t torch_stream(int device);

}  // namespace tandem::python
