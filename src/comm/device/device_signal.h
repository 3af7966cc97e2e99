// Plain structs that the host passes by value to kernels that signal and wait.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string_view>
#include <utility>

namespace tandem::gpu {

constexpr int kMaxGpus = 8;

/// Operation that waits, in a device-side error: kernels carry its number. These are comm/'s own;
/// an upper layer has its own numbers and names them by WaitNames.
enum class OpId : int {
  wait = 0,
  all_reduce = 1,
  all_gather = 2,
  reduce_scatter = 3,
  align = 8,
  all_to_all = 9,
  broadcast = 10,
  send = 11,
  recv = 12
};
/// "?" for a number without a name.
std::string_view name_of(OpId op);

/// Number of the operation `op`, a literal; one that is not known gets the next free number. Throws
/// std::logic_error if there is none.
OpId wait_number(std::string_view op);

/// Names operations for the rest of the process: a constant next to their numbers. Their names must
/// be literals. Throws std::logic_error for a number that has another name.
struct WaitNames {
  WaitNames(std::initializer_list<std::pair<OpId, std::string_view>> names);
};

/// Tag that distinguishes the calls of a layer's forward and backward passes: equal on ranks that
/// are in the same call. Kernels exchange it along with the call's first message.
struct CallTag {
  static constexpr int kForwardBits = 40, kLayerBits = 23;
  bool backward = false;
  uint64_t layer = 0;
  uint64_t forward = 0;  ///< backward pass: number of its forward pass

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

/// Record, in host memory that kernels write, of this rank's first wait that timed out.
struct ErrorRecord {
  static constexpr int kNone = 0, kWriting = 1, kTimeout = 2, kAborted = 3;
  /// A rank is in another call: `seen` holds its CallTag, `epoch` this rank's.
  static constexpr int kMismatch = 4;
  int state = kNone;
  int op = 0;
  int peer = -1;
  long long tile = -1;
  unsigned long long epoch = 0, seen = 0;
};

/// Deadline of device-side waits and the record they report to.
struct Deadline {
  ErrorRecord* record = nullptr;
  uint64_t deadline_ns = 0;
};

/// Extends the deadline by a quarter, for a wait on a peer that may itself be waiting: the peer
/// then times out first and names the rank that is really missing.
constexpr Deadline extend_deadline(const Deadline& deadline) {
  return {deadline.record, deadline.deadline_ns / 4 * 5};
}

/// Counter of a kernel's calls, advanced by the kernel, in device memory; initially zero.
struct CallCounter {
  uint64_t epoch = 0;    ///< number of the last call
  unsigned readers = 0;  ///< readers that are done with this call's epoch; 0 between calls
  uint64_t lost = 0;     ///< first call that timed out on a peer; 0 if none
};

/// Symmetric buffer as this rank's kernels address it: every rank's memory and signal words.
struct PeerTable {
  std::byte* memory[kMaxGpus] = {};
  uint64_t* signals[kMaxGpus] = {};
  int rank = 0, size = 1;
};

}  // namespace tandem::gpu
