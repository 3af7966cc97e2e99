// C interface of tandem_cudnn.so, which has cuDNN's causal attention over bf16 rows. The library
// opens it at first use (plugin_loader.h), so programs start without cuDNN. No function throws.
#pragma once

#include <stddef.h>
#include <stdint.h>

struct CUstream_st;  // CUDA's: cudaStream_t points to it

extern "C" {

enum TandemCudnnPass { kTandemCudnnForward, kTandemCudnnBackward };

/// Head h of position p of sequence b is at row b * seq + p, column h * head_dim of its tensor.
/// Sizes and strides count elements; rows start at multiples of 16 bytes.
struct TandemCudnnShape {
  int64_t batch, seq, heads, kv_heads, head_dim;
  int64_t qkv_stride;  ///< between rows of q, k, v, dq, dk and dv
  int64_t out_stride;  ///< between rows of out and dout
  float scale;         ///< of scores
  enum TandemCudnnPass pass;
  int deterministic;  ///< backward only: equal bits in every run
  int64_t window;     ///< keys that a query reads, its own included; 0: all before it
};

/// Device memory of one run; the last four are for the backward pass. q and k are rotated.
struct TandemCudnnTensors {
  const void *q, *k, *v;
  void* out;
  float* log_sums;  ///< [batch, heads, seq] without gaps
  const void* dout;
  void *dq, *dk, *dv;
};

struct TandemCudnnHandle;  ///< of one thread and stream
struct TandemCudnnPlan;

struct TandemCudnn {
  int interface_version;
  size_t compiled_version;  ///< 91900 is cuDNN 9.19.0
  size_t running_version;
  /// Reason why this thread's last call failed.
  const char* (*error_text)(void);
  /// Nullptr on failure.
  struct TandemCudnnHandle* (*create_handle)(struct CUstream_st* stream);
  void (*destroy_handle)(struct TandemCudnnHandle* handle);
  /// Loads device code, which waits for all kernels of the device. Nullptr on failure. The handle
  /// must outlive the plan.
  struct TandemCudnnPlan* (*create_plan)(struct TandemCudnnHandle* handle,
                                         const struct TandemCudnnShape* shape);
  void (*destroy_plan)(struct TandemCudnnPlan* plan);
  /// Bytes of device memory that a run overwrites.
  int64_t (*workspace_bytes)(const struct TandemCudnnPlan* plan);
  /// Enqueues the plan's pass on the handle's stream, without waiting. Returns 0, or 1 on failure.
  int (*run)(const struct TandemCudnnPlan* plan, const struct TandemCudnnTensors* tensors,
             void* workspace);
  /// Whether cuDNN has a kernel for the shape on a GPU that `device` describes (cuDNN's JSON).
  /// Needs no GPU, but libcuda.so.1. Returns 0, or 1 on failure.
  int (*check_shape)(const struct TandemCudnnShape* shape, const char* device, int sm_version);
};

/// Changes whenever a declaration of this file does.
enum { kTandemCudnnInterface = 2 };

/// The only exported function. The result is valid until the library is closed.
const struct TandemCudnn* tandem_cudnn(void);

}  // extern "C"
