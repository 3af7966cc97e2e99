// Tail of the fused GEMM+AR: all-reduces a finished tile over the ranks and stores it. Run by one
// warpgroup of every rank for the same tile; partial sums are rounded first and added in rank
// order, in f32, so that both exchanges give the same bits on every rank.
//
// one-shot: every rank sends its tile to all others. two-shot: every rank sums a share of the
// tile's 16-byte vectors (vecs) and sends the result: a fraction of the bytes, but two latencies.
//
// Uses no fences and no flags: a word has arrived when it differs from the value of an empty slot.
// Rounding maps every NaN to 0x7fff, so no word of results is all ones, and an f32 sum with these
// bits is given those of another NaN; words are sent inverted, so that 0 is never a value and fresh
// memory is empty. The reader of a slot empties it; the end of the call orders this before the next
// use of the slot, not these accesses (ArStaging in fused.h).
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/numeric_conversion.h>

#include <cute/tensor.hpp>
#include <type_traits>

#include "comm/device/device_signal.cuh"
#include "overlap/contract/cuda/wait_ids.h"
#include "overlap/gemm_ar/cuda/fused.h"

namespace tandem::gpu::fused {

/// For kTokenTiles times as many tokens, each kTokens of which are a separate tile, numbered
/// consecutively. Accumulators of e4m3 are scaled before they are rounded.
template <class Element, int kTokens, int kTokenTiles, bool kScaled>
class ExchangeTile {
  static constexpr int kFeatures = ArStaging::kFeatures, kThreads = ArStaging::kThreads;
  static constexpr ArStaging kShape{1, 0, kTokens};
  static constexpr int kWords = kTokens / 4;  // words of two elements, per thread
  static constexpr int kVecs = kShape.vecs(), kVecWords = kWords / kVecs;
  static constexpr size_t kVecRow = kShape.vec_row();
  static constexpr int kStaged = kTokens < 64 ? kTokens : 64;  // tokens stored together
  static constexpr int kRowStride = kFeatures + 8;  // padded against bank conflicts between rows
  using Two = cutlass::Array<Element, 2>;
  using TwoFloats = cutlass::Array<float, 2>;
  struct Vec {
    uint32_t at[kVecWords];
  };
  static constexpr uint32_t kNoWord = ~uint32_t(0);  // two elements that rounding never gives

  struct Scales {
    float of_features[kFeatures], of_tokens[kTokens];
  };
  struct NoScales {};  // a base, as host and device disagree on which members take no space

 public:
  struct alignas(16) Storage : std::conditional_t<kScaled, Scales, NoScales> {
    Element rows[kStaged][kRowStride];
  };

  /// For `thread` of warpgroup `group`.
  CUTLASS_DEVICE ExchangeTile(FusedArArgs const& args, Storage& storage, int group, int thread,
                              uint64_t epoch)
      : args_(args), storage_(storage), group_(group), thread_(thread), epoch_(epoch) {}

  /// Starts loading the scales of the tile's sums for run(). The previous tile's run has read its
  /// scales before its last barrier.
  CUTLASS_DEVICE void fetch_scales(int tile) const {
    const ScalePointers& from = args_.scales;
    const int feature = min(first_feature(tile) + thread_, int(args_.n) - 1);
    const int token = min(first_token(tile) + thread_, int(args_.m) - 1);
    if (thread_ < kFeatures) {
      cp_async_f32(storage_.of_features[thread_],
                   from.weight + (args_.scaled_by_row ? feature : 0));
    }
    if (thread_ < kTokens) {
      cp_async_f32(storage_.of_tokens[thread_], from.x + (args_.scaled_by_row ? token : 0));
    }
  }

  /// Stores the accumulators of a range of K, a split-K partial, for the tile's main block; this
  /// block is number `helper` of its helpers.
  template <class Accumulators>
  CUTLASS_DEVICE void store_partial(int tile, int helper, Accumulators const& accumulators) const {
    std::byte* to = split_partial_at(tile, helper);
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < 2 * kWords; first += kVecWords) {
      Vec vec;
      CUTLASS_PRAGMA_UNROLL
      for (int w = 0; w < kVecWords; ++w) {
        const uint32_t word = __float_as_uint(accumulators(first + w));
        vec.at[w] = word == kNoWord ? word >> 1 : word;  // a NaN either way
      }
      store_vec(to + first / kVecWords * kVecRow, vec);
    }
  }
  /// Adds the split-K partials of `helpers`, in their order. False as for wait_signal, and only for
  /// this thread.
  template <class Accumulators>
  CUTLASS_DEVICE bool add_partials(int tile, int helpers, Accumulators& accumulators) const {
    constexpr int kCount = 2 * kVecs < 4 ? 2 * kVecs : 4;
    for (int helper = 0; helper < helpers; ++helper) {
      std::byte* from = split_partial_at(tile, helper);
      CUTLASS_PRAGMA_UNROLL
      for (int first = 0; first < 2 * kVecs; first += kCount) {
        Vec vecs[kCount];
        const auto at = [&](int i) { return from + (first + i) * kVecRow; };
        const auto sender = [&](int) { return peers().rank; };
        if (!receive(tile, extend_deadline(args_.deadline), at, sender, vecs)) return false;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kCount * kVecWords; ++i) {
          accumulators(first * kVecWords + i) +=
              __uint_as_float(vecs[i / kVecWords].at[i % kVecWords]);
        }
      }
    }
    return true;
  }

  /// Called by all threads. Threads without the `whole` sum send nothing.
  template <class Accumulators>
  CUTLASS_DEVICE void run(int tile, Accumulators const& accumulators, bool whole) const {
    static_assert(int(cute::size(Accumulators{})) == 2 * kWords);
    uint32_t words[kWords];
    round(tile, accumulators, words);
    const bool sends = whole && peers().size > 1, shares = sends && args_.two_shot;
    if constexpr (kShape.one_shot()) {
      if (sends && !shares) one_shot(tile, words);
    }
    if constexpr (kShape.two_shot()) {
      if (shares) share_out(tile, words);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < kTokens; first += kStaged) {
      if constexpr (kShape.two_shot()) {
        if (shares) gather(tile, first, words);
      }
      store(tile, first, words);
    }
  }

 private:
  CUTLASS_DEVICE PeerTable const& peers() const { return args_.staging; }
  CUTLASS_DEVICE int parity() const { return int(epoch_ % 2); }
  CUTLASS_DEVICE void sync() const { cutlass::arch::NamedBarrier::sync(kThreads, group_); }
  CUTLASS_DEVICE static int first_feature(int tile) { return tile / kTokenTiles * kFeatures; }
  CUTLASS_DEVICE static int first_token(int tile) { return tile % kTokenTiles * kTokens; }
  // This thread's vector 0.
  CUTLASS_DEVICE std::byte* split_partial_at(int tile, int helper) const {
    return args_.split_partials + args_.layout.split_partial(helper, tile) +
           size_t(thread_) * sizeof(Vec);
  }
  // This thread's vector 0 in the area at `offset` of a rank's memory.
  CUTLASS_DEVICE std::byte* vecs_at(int rank, size_t offset) const {
    return peers().memory[rank] + offset + size_t(thread_) * sizeof(Vec);
  }

  // For every 8 tokens, a thread has two adjacent ones of feature `lane / 4` of its warp's 16, and
  // then the same of the feature 8 further on.
  template <class Accumulators>
  CUTLASS_DEVICE void round(int tile, Accumulators const& accumulators,
                            uint32_t (&words)[kWords]) const {
    if constexpr (kScaled) {
      cute::cp_async_wait<0>();
      sync();
    }
    float bias[2] = {0, 0}, scale[2];
    if (args_.bias != nullptr) {
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int feature = first_feature(tile) + thread_ / 32 * 16 + thread_ % 32 / 4 + 8 * half;
        if (feature < args_.n) bias[half] = float(static_cast<const Element*>(args_.bias)[feature]);
      }
    }
    if constexpr (kScaled) {
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        scale[half] = storage_.of_features[thread_ / 32 * 16 + thread_ % 32 / 4 + 8 * half];
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int w = 0; w < kWords; ++w) {
      TwoFloats values{accumulators(2 * w), accumulators(2 * w + 1)};
      if constexpr (kScaled) {
        const float* token = storage_.of_tokens + w / 2 * 8 + thread_ % 4 * 2;
        values[0] = values[0] * token[0] * scale[w % 2];
        values[1] = values[1] * token[1] * scale[w % 2];
      }
      values[0] += bias[w % 2];
      values[1] += bias[w % 2];
      words[w] = to_word(values);
    }
  }
  CUTLASS_DEVICE static void cp_async_f32(float& to, const float* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(cute::cast_smem_ptr_to_uint(&to)),
                 "l"(from)
                 : "memory");
  }
  CUTLASS_DEVICE static uint32_t to_word(TwoFloats const& values) {
    const Two rounded = cutlass::NumericArrayConverter<Element, float, 2>{}(values);
    return reinterpret_cast<uint32_t const&>(rounded);
  }
  CUTLASS_DEVICE static void add(TwoFloats& sum, uint32_t word) {
    const TwoFloats values =
        cutlass::NumericArrayConverter<float, Element, 2>{}(reinterpret_cast<Two const&>(word));
    sum[0] += values[0];
    sum[1] += values[1];
  }

  CUTLASS_DEVICE static void store_vec(std::byte* to, Vec const& vec) {
    if constexpr (kVecWords == 2) {
      asm volatile("st.relaxed.sys.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(~vec.at[0]),
                   "r"(~vec.at[1])
                   : "memory");
    } else {
      asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to),
                   "r"(~vec.at[0]), "r"(~vec.at[1]), "r"(~vec.at[2]), "r"(~vec.at[3])
                   : "memory");
    }
  }
  CUTLASS_DEVICE static void store_empty(std::byte* slot) {
    Vec nothing;
    CUTLASS_PRAGMA_UNROLL
    for (uint32_t& word : nothing.at) word = kNoWord;
    store_vec(slot, nothing);
  }
  CUTLASS_DEVICE static Vec load_vec(const std::byte* from) {
    Vec vec;
    if constexpr (kVecWords == 2) {
      asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];"
                   : "=r"(vec.at[0]), "=r"(vec.at[1])
                   : "l"(from)
                   : "memory");
    } else {
      const uint4 words = load_fresh(reinterpret_cast<const uint4*>(from));
      vec = {words.x, words.y, words.z, words.w};
    }
    CUTLASS_PRAGMA_UNROLL
    for (uint32_t& word : vec.at) word = ~word;
    return vec;
  }
  CUTLASS_DEVICE static bool arrived(Vec const& vec) {
    bool all = true;
    CUTLASS_PRAGMA_UNROLL
    for (const uint32_t word : vec.at) all = all && word != kNoWord;
    return all;
  }

  // Waits for the vectors in slots `at(i)`, loads them and empties the slots; their senders are
  // `sender(i)` (-1: none). Polls all of them until each has arrived; returns false after the
  // deadline or an abort, as wait_signal() does. Many loads in flight cover memory latency.
  template <int kCount, class At, class Sender>
  CUTLASS_DEVICE bool receive(int tile, Deadline const& deadline, At const& at,
                              Sender const& sender, Vec (&vecs)[kCount]) const {
    // Does not use Deadline and has_failed() of device_signal.cuh: with them, and with peer_at()
    // below, these loops compile to other instructions than those that were measured.
    uint64_t begin = 0;
    for (unsigned spin = 0;; ++spin) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) vecs[i] = load_vec(at(i));
      int missing = -1;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kCount; ++i) {
        missing = arrived(vecs[i]) ? missing : max(missing, sender(i));
      }
      if (missing < 0) break;
      if (spin == 0) begin = nanoseconds();
      // Checks after fewer rounds than wait_signal(): each round loads kCount vectors and takes
      // longer.
      if (spin % 256 != 255) continue;
      const bool failed =
          *reinterpret_cast<volatile int*>(&deadline.record->state) != ErrorRecord::kNone;
      if (!failed && nanoseconds() - begin <= deadline.deadline_ns) continue;
      if (!failed) report_timeout(deadline, kGemmArWait, missing, tile, epoch_, 0);
      give_up(args_.calls, epoch_);
      return false;
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) store_empty(at(i));
    return true;
  }

  CUTLASS_DEVICE static Vec vec_of(uint32_t const (&words)[kWords], int vec) {
    Vec result;
    CUTLASS_PRAGMA_UNROLL
    for (int w = 0; w < kVecWords; ++w) result.at[w] = words[kVecWords * vec + w];
    return result;
  }

  CUTLASS_DEVICE void one_shot(int tile, uint32_t (&words)[kWords]) const {
    const int size = peers().size, rank = peers().rank;
    for (int s = 1; s < size; ++s) {
      const int peer = rank + s < size ? rank + s : rank + s - size;
      std::byte* to = vecs_at(peer, args_.layout.whole(parity(), rank, tile));
      CUTLASS_PRAGMA_UNROLL
      for (int vec = 0; vec < kVecs; ++vec) store_vec(to + vec * kVecRow, vec_of(words, vec));
    }
    if (size <= 4) {
      add_whole<4, kVecs>(tile, words);
    } else {
      add_whole<kMaxGpus, (kVecs < 2 ? kVecs : 2)>(tile, words);
    }
  }

  // For absent ranks the last rank's vectors are loaded: without branches all loads are in flight
  // together.
  template <int kRanks, int kAtOnce>
  CUTLASS_DEVICE void add_whole(int tile, uint32_t (&words)[kWords]) const {
    const int size = peers().size, rank = peers().rank;
    std::byte* slots = vecs_at(rank, args_.layout.whole(parity(), 0, tile));
    const size_t of_rank = args_.layout.whole(0, 1, 0);
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < kVecs; first += kAtOnce) {
      Vec vecs[kRanks * kAtOnce];
      const auto at = [&](int i) {
        const int r = i / kAtOnce;
        return slots + (r < size ? r : size - 1) * of_rank + (first + i % kAtOnce) * kVecRow;
      };
      const auto sender = [&](int i) {
        const int r = i / kAtOnce;
        return r >= size || r == rank ? -1 : r;
      };
      if (!receive(tile, args_.deadline, at, sender, vecs)) return;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < kRanks; ++r) {
          if (r == rank) vecs[r * kAtOnce + i] = vec_of(words, first + i);
        }
        const Vec sum = sum_of<kRanks>([&](int r) { return vecs[r * kAtOnce + i]; });
        CUTLASS_PRAGMA_UNROLL
        for (int w = 0; w < kVecWords; ++w) words[kVecWords * (first + i) + w] = sum.at[w];
      }
    }
  }

  template <int kRanks, class VecOf>
  CUTLASS_DEVICE Vec sum_of(VecOf const& vec_of_rank) const {
    Vec result;
    CUTLASS_PRAGMA_UNROLL
    for (int w = 0; w < kVecWords; ++w) {
      TwoFloats sum{0.f, 0.f};
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kRanks; ++r) {
        add(sum, r < peers().size ? vec_of_rank(r).at[w] : 0);  // a sum is never -0
      }
      result.at[w] = to_word(sum);
    }
    return result;
  }

  // Vector p of tile t belongs to rank (p + t) % ranks, as its vector p / ranks: the first vectors
  // of all owners are sent first, and their sums are in flight while the next ones arrive.
  CUTLASS_DEVICE void share_out(int tile, uint32_t const (&words)[kWords]) const {
    const int size = peers().size, rank = peers().rank, first_owner = tile % size;
    const size_t local = args_.layout.share(parity(), rank, tile);
    int owner = first_owner, row = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int vec = 0; vec < kVecs; ++vec) {
      store_vec(vecs_at(owner, local) + row * kVecRow, vec_of(words, vec));
      owner = owner + 1 < size ? owner + 1 : 0;
      row += owner == first_owner;
    }
    if (size <= 4) {
      reduce_share<4>(tile);
    } else {
      reduce_share<kMaxGpus>(tile);
    }
  }

  // Sums the vectors that this rank owns and sends them to all ranks, including this one.
  template <int kRanks>
  CUTLASS_DEVICE void reduce_share(int tile) const {
    const int size = peers().size, rank = peers().rank, first_owner = tile % size;
    std::byte* slots = vecs_at(rank, args_.layout.share(parity(), 0, tile));
    const size_t of_rank = args_.layout.share(0, 1, 0) - args_.layout.share(0, 0, 0);
    std::byte* slot = slots;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int vec = rank >= first_owner ? rank - first_owner : rank - first_owner + size;
         vec < kVecs; vec += size) {
      Vec vecs[kRanks];
      const auto at = [&](int r) { return slot + (r < size ? r : size - 1) * of_rank; };
      const auto sender = [&](int r) { return r < size ? r : -1; };
      if (!receive(tile, args_.deadline, at, sender, vecs)) return;  // incomplete sums are not sent
      const Vec sum = sum_of<kRanks>([&](int r) { return vecs[r]; });
      const size_t to = args_.layout.sum(parity(), tile) + size_t(vec) * kVecRow;
      for (int s = 1; s <= size; ++s) {
        store_vec(vecs_at(rank + s < size ? rank + s : rank + s - size, to), sum);
      }
      slot += kVecRow;
    }
  }

  // Receives the sums of the tokens that are stored together.
  CUTLASS_DEVICE void gather(int tile, int first, uint32_t (&words)[kWords]) const {
    constexpr int kCount = kStaged * kVecs / kTokens;
    const int size = peers().size, first_vec = first * kVecs / kTokens;
    std::byte* sums = vecs_at(peers().rank, args_.layout.sum(parity(), tile));
    Vec vecs[kCount];
    // Deadline extended, as their owners wait for the other ranks' shares.
    receive(
        tile, extend_deadline(args_.deadline),
        [&](int i) { return sums + (first_vec + i) * kVecRow; },
        [&](int i) { return (first_vec + i + tile) % size; }, vecs);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kCount; ++i) {
      CUTLASS_PRAGMA_UNROLL
      for (int w = 0; w < kVecWords; ++w) {
        words[kVecWords * (first_vec + i) + w] = vecs[i].at[w];
      }
    }
  }

  // Each word holds a thread's two elements of an 8 x 8 matrix of features and tokens, which is
  // transposed on its way into shared memory; whole rows of 64 features are stored from there.
  CUTLASS_DEVICE void store(int tile, int first, uint32_t const (&words)[kWords]) const {
    const int lane = thread_ % 32, feature = thread_ / 32 * 16 + lane / 8 % 2 * 8;
    const int column8 = thread_ % 8;
    const int column = first_feature(tile) + column8 * 8;
    sync();  // the previous rows have been read
    if constexpr (kTokens == 8) {
      const uint32_t to = cute::cast_smem_ptr_to_uint(&storage_.rows[lane % 8][feature]);
      asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to),
                   "r"(words[0]), "r"(words[1])
                   : "memory");
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int token = 0; token < kStaged; token += 16) {
        const int w = (first + token) / 4;
        const uint32_t to =
            cute::cast_smem_ptr_to_uint(&storage_.rows[token + lane / 16 * 8 + lane % 8][feature]);
        asm volatile(
            "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
            "r"(words[w]), "r"(words[w + 1]), "r"(words[w + 2]), "r"(words[w + 3])
            : "memory");
      }
    }
    sync();
    CUTLASS_PRAGMA_UNROLL
    for (int token = thread_ / 8; token < kStaged; token += kThreads / 8) {
      const int64_t row = first_token(tile) + first + token;
      if (row >= args_.m || column >= args_.n) continue;
      auto* out = static_cast<Element*>(args_.out) + row * args_.n + column;
      *reinterpret_cast<uint4*>(out) =
          *reinterpret_cast<const uint4*>(&storage_.rows[token][column8 * 8]);
    }
  }

  FusedArArgs const& args_;
  Storage& storage_;
  int group_, thread_;
  uint64_t epoch_;
};

}  // namespace tandem::gpu::fused
