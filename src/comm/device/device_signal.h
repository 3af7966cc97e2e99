// What the host hands to kernels that signal and wait: plain structs, passed by value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tandem::gpu {

constexpr int kMaxGpus = 8;

/// Who waits, in a device-side error.
enum class OpId : int {
  wait,
  all_reduce,
  all_gather,
  reduce_scatter,
  ag_gemm,
  gemm_rs,
  gemm_ar,
  ag_wgrad,
  align,
  all_to_all,
  broadcast,
  send,
  recv
};
constexpr std::string_view name_of(OpId op) {
  switch (op) {
    case OpId::wait:
      return "wait";
    case OpId::all_reduce:
      return "all_reduce";
    case OpId::all_gather:
      return "all_gather";
    case OpId::reduce_scatter:
      return "reduce_scatter";
    case OpId::ag_gemm:
      return "ag_gemm";
    case OpId::gemm_rs:
      return "gemm_rs";
    case OpId::gemm_ar:
      return "gemm_ar";
    case OpId::ag_wgrad:
      return "ag_wgrad";
    case OpId::align:
      return "align";
    case OpId::all_to_all:
      return "all_to_all";
    case OpId::broadcast:
      return "broadcast";
    case OpId::send:
      return "send";
    case OpId::recv:
      return "recv";
  }
  return "?";
}

/// Tells the calls of a layer's forward and backward passes apart: equal on ranks that are in the
/// same call. Kernels exchange it beside what the call begins with.
struct CallTag {
  static constexpr int kForwardBits = 40, kLayerBits = 23;
  bool backward = false;
  uint64_t layer = 0;
  uint64_t forward = 0;  ///< of a backward pass: the number of the forward pass that it is of

  constexpr uint64_t pack() const {
    return uint64_t(backward) << (kForwardBits + kLayerBits) |
           (layer & ((uint64_t(1) << kLayerBits) - 1)) << kForwardBits |
           (forward & ((uint64_t(1) << kForwardBits) - 1));
  }
  static constexpr CallTag unpack(uint64_t tag) {
    return {(tag >> (kForwardBits + kLayerBits)) != 0,
            tag >> kForwardBits & ((uint64_t(1) << kLayerBits) - 1),
            tag & ((uint64_t(1) << kForwardBits) - 1)};
  }
};

/// In host memory that kernels write: the first wait on this rank that gave up.
struct ErrorRecord {
  static constexpr int kNone = 0, kWriting = 1, kTimeout = 2, kAborted = 3;
  /// A rank is in another call: `seen` has its CallTag, `epoch` this rank's.
  static constexpr int kMismatch = 4;
  int state = kNone;
  int op = 0;
  int peer = -1;
  long long tile = -1;
  unsigned long long epoch = 0, seen = 0;
};

/// How long device-side waits last and where they report.
struct Watch {
  ErrorRecord* record = nullptr;
  uint64_t deadline_ns = 0;
};

/// For who waits for what a peer sends, which may wait itself: that one then gives up first, and
/// names who is really missing.
constexpr Watch patient(const Watch& watch) {
  return {watch.record, watch.deadline_ns / 4 * 5};
}

/// The calls of a kernel that counts them itself, in device memory, zero at first.
struct CallCounter {
  uint64_t epoch = 0;    ///< of the last call
  unsigned readers = 0;  ///< who are done with this call's; 0 between calls
  uint64_t lost = 0;     ///< the first call that gave up on a peer; 0: none did
};

/// One symmetric buffer as this rank's kernels address it: every rank's memory and signal words.
struct PeerTable {
  std::byte* memory[kMaxGpus] = {};
  uint64_t* signals[kMaxGpus] = {};
  int rank = 0, size = 1;
};

}  // namespace tandem::gpu
