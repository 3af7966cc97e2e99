// The tail of the fused GEMM+AR: a finished tile becomes the ranks' sum of it and is stored. Run by
// one warpgroup of every rank's same tile; partial sums are rounded first and added in rank order,
// in f32, so that both exchanges give the same bits on every rank.
//
// one-shot: every rank sends its tile to all others, each word with its flag beside it in one
// 64-bit store: nothing is fenced, and each thread waits for its own words only.
// two-shot: every rank sums a share of the tile's packs and sends the result: a fraction of the
// bytes, with two flags per tile and peer.
#pragma once

#include <cutlass/arch/barrier.h>
#include <cutlass/numeric_conversion.h>

#include <cute/tensor.hpp>

#include "comm/nccl/device_signal.cuh"
#include "overlap/gemm_ar/cuda/fused.h"

namespace tandem::gpu::fused {

template <class Element, int kTokens>
class ExchangeTile {
  static constexpr int kFeatures = ArStaging::kFeatures, kThreads = ArStaging::kThreads;
  static constexpr ArStaging kShape{1, 0, kTokens};
  static constexpr int kPacks = kShape.packs(), kPairs = kShape.pairs();
  static constexpr int kWords = kTokens / 4;                   // of two elements, by thread
  static constexpr int kStaged = kTokens < 64 ? kTokens : 64;  // tokens stored together
  static constexpr int kLine = kFeatures + 8;                  // no two rows share their banks
  using Two = cutlass::Array<Element, 2>;
  using TwoFloats = cutlass::Array<float, 2>;
  // Two words of results, each in the low half, with the epoch in the high one.
  struct Flagged {
    uint64_t at[2];
  };

 public:
  struct alignas(16) Storage {
    Element lines[kStaged][kLine];
  };

  CUTLASS_DEVICE ExchangeTile(FusedArJob const& job, Storage& storage, int thread, uint64_t epoch)
      : job_(job), storage_(storage), thread_(thread), epoch_(epoch) {}

  CUTLASS_DEVICE static uint64_t this_epoch(FusedArJob const& job) {
    return *const_cast<volatile uint64_t*>(job.epoch) + 1;
  }

  template <class Accumulators>
  CUTLASS_DEVICE void run(int tile, Accumulators const& accumulators) const {
    static_assert(int(cute::size(Accumulators{})) == 2 * kWords);
    uint32_t words[kWords];
    round(tile, accumulators, words);
    if (peers().size > 1) {
      bool done = false;
      if constexpr (kShape.one_shot()) {
        if (!job_.two_shot) {
          one_shot(tile, words);
          done = true;
        }
      }
      if constexpr (kShape.two_shot()) {
        if (!done) two_shot(tile, words);
      }
    }
    store(tile, words);
  }

  // The last block to end advances the epoch: all others have read it.
  CUTLASS_DEVICE void end_call() const {
    sync();
    if (thread_ != 0) return;
    __threadfence();
    if (atomicAdd(job_.ended, 1u) == gridDim.x - 1) {
      *job_.ended = 0;
      *job_.epoch = epoch_;
    }
  }

 private:
  CUTLASS_DEVICE PeerTable const& peers() const { return job_.staging; }
  CUTLASS_DEVICE int parity() const { return int(epoch_ % 2); }
  CUTLASS_DEVICE static void sync() { cutlass::arch::NamedBarrier::sync(kThreads, 0); }
  // This thread's pack 0 in the area that begins at `offset` of a rank's memory.
  CUTLASS_DEVICE std::byte* packs_at(int rank, size_t offset) const {
    return peers().memory[rank] + offset + size_t(thread_) * 16;
  }

  // A thread has, for every 8 tokens, two neighbouring ones of feature `lane / 4` of its warp's 16,
  // and then the same of the feature 8 further on.
  template <class Accumulators>
  CUTLASS_DEVICE void round(int tile, Accumulators const& accumulators,
                            uint32_t (&words)[kWords]) const {
    float bias[2] = {0, 0};
    if (job_.bias != nullptr) {
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int feature = tile * kFeatures + thread_ / 32 * 16 + thread_ % 32 / 4 + 8 * half;
        if (feature < job_.n) bias[half] = float(static_cast<const Element*>(job_.bias)[feature]);
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int w = 0; w < kWords; ++w) {
      const TwoFloats values{accumulators(2 * w) + bias[w % 2],
                             accumulators(2 * w + 1) + bias[w % 2]};
      words[w] = to_word(values);
    }
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

  CUTLASS_DEVICE void one_shot(int tile, uint32_t (&words)[kWords]) const {
    const int size = peers().size, rank = peers().rank;
    const uint64_t flag = epoch_ << 32;
    for (int s = 1; s < size; ++s) {
      const int peer = rank + s < size ? rank + s : rank + s - size;
      std::byte* to = packs_at(peer, job_.layout.flagged(parity(), rank, tile));
      CUTLASS_PRAGMA_UNROLL
      for (int pair = 0; pair < kPairs; ++pair) {
        asm volatile(
            "st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(to + pair * ArStaging::kPackRow),
            "l"(flag | words[2 * pair]), "l"(flag | words[2 * pair + 1])
            : "memory");
      }
    }
    if (size <= 4) {
      add_flagged<4, (kPairs < 4 ? kPairs : 4)>(tile, words);
    } else {
      add_flagged<kMaxGpus, (kPairs < 2 ? kPairs : 2)>(tile, words);
    }
  }

  CUTLASS_DEVICE static Flagged load_flagged(const std::byte* from) {
    Flagged pair;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(pair.at[0]), "=l"(pair.at[1])
                 : "l"(from)
                 : "memory");
    return pair;
  }
  CUTLASS_DEVICE bool arrived(Flagged const& pair) const {
    return uint32_t(pair.at[0] >> 32) == uint32_t(epoch_) &&
           uint32_t(pair.at[1] >> 32) == uint32_t(epoch_);
  }

  // Looks again at all words until each is of this epoch; ends like wait_signal, too, after the
  // deadline or an abort. Many loads at once cover the memory's latency.
  template <int kRanks, int kAtOnce>
  CUTLASS_DEVICE void await_flagged(int tile, int first, Flagged (&landed)[kRanks][kAtOnce]) const {
    const int size = peers().size, rank = peers().rank;
    const std::byte* slots =
        packs_at(rank, job_.layout.flagged(parity(), 0, tile)) + first * ArStaging::kPackRow;
    const size_t slot = job_.layout.flagged(0, 1, 0);
    uint64_t begin = 0;
    for (unsigned spin = 0;; ++spin) {
      // Of ranks that are not there the last one's words are loaded: without a branch between them
      // all loads are under way together.
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kRanks; ++r) {
        const std::byte* from = slots + (r < size ? r : size - 1) * slot;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          landed[r][i] = load_flagged(from + i * ArStaging::kPackRow);
        }
      }
      int missing = -1;
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kRanks; ++r) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          missing = r >= size || r == rank || arrived(landed[r][i]) ? missing : r;
        }
      }
      if (missing < 0) return;
      if (spin == 0) begin = nanoseconds();
      if (spin % 256 != 255) continue;  // the record is host memory: look seldom
      const Watch& watch = job_.watch;
      if (*reinterpret_cast<volatile int*>(&watch.record->state) != ErrorRecord::kNone) return;
      if (nanoseconds() - begin > watch.deadline_ns) {
        return report_timeout(watch, OpId::gemm_ar, missing, tile, epoch_, 0);
      }
    }
  }

  template <int kRanks, int kAtOnce>
  CUTLASS_DEVICE void add_flagged(int tile, uint32_t (&words)[kWords]) const {
    const int size = peers().size, rank = peers().rank;
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < kPairs; first += kAtOnce) {
      Flagged landed[kRanks][kAtOnce];
      await_flagged(tile, first, landed);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2 * kAtOnce; ++i) {
        TwoFloats sum{0.f, 0.f};
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < kRanks; ++r) {
          const uint32_t word =
              r == rank ? words[2 * first + i] : uint32_t(landed[r][i / 2].at[i % 2]);
          add(sum, r < size ? word : 0);  // a sum is never -0, which this would change
        }
        words[2 * first + i] = to_word(sum);
      }
    }
  }

  CUTLASS_DEVICE static void store_pack(std::byte* to, uint4 const& pack) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(pack.x), "r"(pack.y),
                 "r"(pack.z), "r"(pack.w)
                 : "memory");
  }
  CUTLASS_DEVICE static uint4 load_pack(const std::byte* from) {
    return load_fresh(reinterpret_cast<const uint4*>(from));
  }

  CUTLASS_DEVICE void exchange_flags(int exchange, int tile) const {
    sync();
    const int peer = thread_;
    if (peer < peers().size && peer != peers().rank) {
      const int mine = job_.layout.signal(exchange, peers().rank, tile);
      const int theirs = job_.layout.signal(exchange, peer, tile);
      release_signal(peers().signals[peer] + mine, epoch_);
      wait_signal(peers().signals[peers().rank] + theirs, epoch_, job_.watch, OpId::gemm_ar, peer,
                  tile);
    }
    sync();
  }

  // Share v of a tile's packs begins at v * packs / ranks and belongs to rank (v + tile) % ranks.
  CUTLASS_DEVICE void two_shot(int tile, uint32_t (&words)[kWords]) const {
    const int size = peers().size, rank = peers().rank, turn = tile % size;
    int share = -1, begin = 0;
    CUTLASS_PRAGMA_UNROLL
    for (int pack = 0; pack < kPacks; ++pack) {
      const int of = ((pack + 1) * size - 1) / kPacks;
      if (of != share) begin = pack;
      share = of;
      const int owner = share + turn < size ? share + turn : share + turn - size;
      store_pack(packs_at(owner, job_.layout.part(parity(), rank, tile)) +
                     (pack - begin) * ArStaging::kPackRow,
                 {words[4 * pack], words[4 * pack + 1], words[4 * pack + 2], words[4 * pack + 3]});
    }
    exchange_flags(0, tile);
    const int mine = rank >= turn ? rank - turn : rank - turn + size;
    const int first = mine * kPacks / size, count = (mine + 1) * kPacks / size - first;
    if (size <= 4) {
      add_parts<4, (kPacks < 4 ? kPacks : 4)>(tile, first, count);
    } else {
      add_parts<kMaxGpus, 2>(tile, first, count);
    }
    exchange_flags(1, tile);
    const std::byte* sums = packs_at(rank, job_.layout.sum(parity(), tile));
    CUTLASS_PRAGMA_UNROLL
    for (int pack = 0; pack < kPacks; ++pack) {
      const uint4 sum = load_pack(sums + pack * ArStaging::kPackRow);
      words[4 * pack] = sum.x;
      words[4 * pack + 1] = sum.y;
      words[4 * pack + 2] = sum.z;
      words[4 * pack + 3] = sum.w;
    }
  }

  // Of the packs that this rank owns: their sums go to all ranks, this one too.
  template <int kRanks, int kAtOnce>
  CUTLASS_DEVICE void add_parts(int tile, int first, int count) const {
    const int size = peers().size, rank = peers().rank;
    CUTLASS_PRAGMA_NO_UNROLL
    for (int begin = 0; begin < count; begin += kAtOnce) {
      uint4 parts[kRanks][kAtOnce];
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kRanks; ++r) {
        const std::byte* from =
            packs_at(rank, job_.layout.part(parity(), r < size ? r : size - 1, tile));
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kAtOnce; ++i) {
          const int pack = begin + i < count ? begin + i : begin;
          parts[r][i] = load_pack(from + pack * ArStaging::kPackRow);
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        TwoFloats sums[4];
        CUTLASS_PRAGMA_UNROLL
        for (int w = 0; w < 4; ++w) sums[w] = TwoFloats{0.f, 0.f};
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < kRanks; ++r) {
          const bool there = r < size;
          add(sums[0], there ? parts[r][i].x : 0);
          add(sums[1], there ? parts[r][i].y : 0);
          add(sums[2], there ? parts[r][i].z : 0);
          add(sums[3], there ? parts[r][i].w : 0);
        }
        if (begin + i >= count) continue;
        const uint4 sum{to_word(sums[0]), to_word(sums[1]), to_word(sums[2]), to_word(sums[3])};
        const size_t at =
            job_.layout.sum(parity(), tile) + size_t(first + begin + i) * ArStaging::kPackRow;
        for (int r = 0; r < size; ++r) store_pack(packs_at(r, at), sum);
      }
    }
  }

  // Every word is a thread's part of an 8 x 8 matrix of features and tokens, which is transposed on
  // its way into shared memory; whole lines of 64 features leave from there.
  CUTLASS_DEVICE void store(int tile, uint32_t const (&words)[kWords]) const {
    const int lane = thread_ % 32, feature = thread_ / 32 * 16 + lane / 8 % 2 * 8;
    const int part = thread_ % 8;
    const int column = tile * kFeatures + part * 8;
    CUTLASS_PRAGMA_UNROLL
    for (int first = 0; first < kTokens; first += kStaged) {
      sync();  // the lines before these have left
      if constexpr (kTokens == 8) {
        const uint32_t to = cute::cast_smem_ptr_to_uint(&storage_.lines[lane % 8][feature]);
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to),
                     "r"(words[0]), "r"(words[1])
                     : "memory");
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int token = 0; token < kStaged; token += 16) {
          const int w = (first + token) / 4;
          const uint32_t to = cute::cast_smem_ptr_to_uint(
              &storage_.lines[token + lane / 16 * 8 + lane % 8][feature]);
          asm volatile(
              "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
              "r"(words[w]), "r"(words[w + 1]), "r"(words[w + 2]), "r"(words[w + 3])
              : "memory");
        }
      }
      sync();
      CUTLASS_PRAGMA_UNROLL
      for (int token = thread_ / 8; token < kStaged; token += kThreads / 8) {
        const int64_t row = first + token;
        if (row >= job_.m || column >= job_.n) continue;
        auto* out = static_cast<Element*>(job_.out) + row * job_.n + column;
        *reinterpret_cast<uint4*>(out) =
            *reinterpret_cast<const uint4*>(&storage_.lines[token][part * 8]);
      }
    }
  }

  FusedArJob const& job_;
  Storage& storage_;
  int thread_;
  uint64_t epoch_;
};

}  // namespace tandem::gpu::fused
