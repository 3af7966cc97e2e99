// Recording side of tile_log.h, and CUTLASS's collectives with clock readings around them. One
// thread per role writes each timestamp to memory at once, so that no registers are held through a
// main loop; it does not wait for the write.
#pragma once

#include <cutlass/cutlass.h>

#include <cute/tensor.hpp>
#include <type_traits>

#include "comm/device/device_signal.cuh"
#include "gemm/cuda/tile_log.h"

namespace tandem::gpu::fused {

#ifdef TANDEM_DEVICE_TIMELINE
constexpr bool kDeviceTimeline = true;
#else
constexpr bool kDeviceTimeline = false;
#endif

CUTLASS_DEVICE uint32_t* product_words(TileLog const& log) {
  const unsigned block = blockIdx.x + gridDim.x * blockIdx.y;
  return log.products + block * kProductWords + threadIdx.x / 128 * 2;
}

/// Records for the tile at coordinates `at`, made by the one thread of the calling role that
/// `records`; constructed from parameters that have a `timeline`.
class TileTimestamps {
 public:
  template <class Params>
  CUTLASS_DEVICE explicit TileTimestamps(Params const& params) : log_(params.timeline) {}

  /// Sets `field` of the tile's record to the time, or increments it.
  template <class Coordinates>
  CUTLASS_DEVICE void stamp(Coordinates const& at, bool records,
                            uint32_t TileRecord::*field) const {
    if (records && log_.records) record(at)->*field = timer_word();
  }
  template <class Coordinates>
  CUTLASS_DEVICE void count(Coordinates const& at, bool records,
                            uint32_t TileRecord::*field) const {
    if (records && log_.records) atomicAdd(&(record(at)->*field), 1u);
  }
  /// Longest of several waits, recorded when all are over.
  class Longest {
   public:
    template <class Wait>
    CUTLASS_DEVICE void time(Wait&& wait) {
      const uint32_t begin = timer_word();
      wait();
      const uint32_t end = timer_word();
      if (end - begin > end_ - begin_) begin_ = begin, end_ = end;
    }

   private:
    friend TileTimestamps;
    uint32_t begin_ = 0, end_ = 0;
  };
  template <class Coordinates>
  CUTLASS_DEVICE void span(Coordinates const& at, bool records, uint32_t TileRecord::*begin,
                           uint32_t TileRecord::*end, Longest const& longest) const {
    if (!records || !log_.records) return;
    record(at)->*begin = longest.begin_;
    record(at)->*end = longest.end_;
  }
  /// Records the main loop that preceded this epilogue: only the epilogue knows its tile.
  template <class Coordinates>
  CUTLASS_DEVICE void product(Coordinates const& at, bool records) const {
    if (!records || !log_.records) return;
    TileRecord* of_tile = record(at);
    const uint32_t* words = product_words(log_);
    of_tile->product_begin = words[0];
    of_tile->product_end = words[1];
    processor(at, records);
  }
  /// Records the SM that computes the tile.
  template <class Coordinates>
  CUTLASS_DEVICE void processor(Coordinates const& at, bool records) const {
    if (!records || !log_.records) return;
    uint32_t processor;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(processor));
    TileRecord* of_tile = record(at);
    of_tile->processor = processor;
    atomicAdd(&of_tile->products, 1u);
  }

 private:
  template <class Coordinates>
  CUTLASS_DEVICE TileRecord* record(Coordinates const& at) const {
    return log_.records + int(cute::get<0>(at)) * log_.columns + int(cute::get<1>(at));
  }
  TileLog const& log_;
};

/// Does nothing, in kernels that do not record.
struct NoTimestamps {
  template <class Params>
  CUTLASS_DEVICE explicit NoTimestamps(Params const&) {}
  template <class Coordinates>
  CUTLASS_DEVICE void stamp(Coordinates const&, bool, uint32_t TileRecord::*) const {}
  template <class Coordinates>
  CUTLASS_DEVICE void count(Coordinates const&, bool, uint32_t TileRecord::*) const {}
  struct Longest {
    template <class Wait>
    CUTLASS_DEVICE void time(Wait&& wait) {
      wait();
    }
  };
  template <class Coordinates>
  CUTLASS_DEVICE void span(Coordinates const&, bool, uint32_t TileRecord::*, uint32_t TileRecord::*,
                           Longest const&) const {}
  template <class Coordinates>
  CUTLASS_DEVICE void product(Coordinates const&, bool) const {}
  template <class Coordinates>
  CUTLASS_DEVICE void processor(Coordinates const&, bool) const {}
};

struct WithLog {
  TileLog timeline;
};
struct WithoutLog {};

using Timestamps = std::conditional_t<kDeviceTimeline, TileTimestamps, NoTimestamps>;
/// Base of parameters and arguments.
using OptionalLog = std::conditional_t<kDeviceTimeline, WithLog, WithoutLog>;

template <class Base>
struct TimedMainloop : Base {
  struct Arguments : Base::Arguments, WithLog {};
  struct Params : Base::Params, WithLog {};

  template <class Problem>
  static Params to_underlying_arguments(Problem const& problem, Arguments const& arguments,
                                        void* workspace) {
    return {Base::to_underlying_arguments(problem, arguments, workspace), {arguments.timeline}};
  }

  // Begins when the first operands have arrived, and ends when the last instruction is issued.
  template <class Accumulators>
  CUTLASS_DEVICE void mma(typename Base::MainloopPipeline pipeline,
                          typename Base::PipelineState state, Accumulators& accumulators,
                          int k_tiles, int thread, typename Base::TensorStorage& tensors,
                          Params const& params) {
    if (params.timeline.records) {
      pipeline.consumer_wait(state);
      if (thread == 0) product_words(params.timeline)[0] = timer_word();
    }
    Base::mma(pipeline, state, accumulators, k_tiles, thread, tensors, params);
    if (thread == 0 && params.timeline.records) product_words(params.timeline)[1] = timer_word();
  }
};

template <class Base>
struct TimedEpilogue : Base {
  struct Arguments : Base::Arguments, WithLog {};
  struct Params : Base::Params, WithLog {};

  template <class Problem>
  static Params to_underlying_arguments(Problem const& problem, Arguments const& arguments,
                                        void* workspace) {
    return {Base::to_underlying_arguments(problem, arguments, workspace), {arguments.timeline}};
  }
  CUTLASS_DEVICE TimedEpilogue(Params const& params, typename Base::TensorStorage& storage)
      : Base(params, storage), timestamps_(params) {}

  template <class Problem, class TileShape, class Coordinates, class Accumulators, class Mma>
  CUTLASS_DEVICE auto store(typename Base::LoadPipeline loading,
                            typename Base::LoadPipelineState loads,
                            typename Base::StorePipeline storing,
                            typename Base::StorePipelineState stores, Problem const& problem,
                            TileShape shape, Coordinates const& at,
                            Accumulators const& accumulators, Mma mma, int thread,
                            typename Base::TensorStorage& tensors, int subtile = -1) {
    timestamps_.stamp(at, thread == 0, &TileRecord::store_begin);
    const auto next = Base::store(loading, loads, storing, stores, problem, shape, at, accumulators,
                                  mma, thread, tensors, subtile);
    timestamps_.stamp(at, thread == 0, &TileRecord::store_end);
    timestamps_.count(at, thread == 0, &TileRecord::stores);
    timestamps_.product(at, thread == 0);
    return next;
  }

 private:
  TileTimestamps timestamps_;
};

template <class Base>
using MainloopOnTimeline = std::conditional_t<kDeviceTimeline, TimedMainloop<Base>, Base>;
template <class Base>
using EpilogueOnTimeline = std::conditional_t<kDeviceTimeline, TimedEpilogue<Base>, Base>;

}  // namespace tandem::gpu::fused
