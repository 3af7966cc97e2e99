// The kernel of adding.h: CUTLASS's cooperative Hopper GEMM with its loop along K replaced by one
// in which steps that add parts are spread among those of the product.
#pragma once

#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "overlap/cuda/gemm_setup.cuh"
#include "overlap/cuda/load_steps.cuh"
#include "overlap/cuda/tile_scheduler.cuh"
#include "overlap/gemm_rs/cuda/adding.h"
#include "schedule/adding_order.h"
#include "schedule/ring.h"
#include "schedule/rs_tile_order.h"

namespace tandem::gpu::fused {

// Tiles of 128 rows, of which each of two warpgroups has 64. To CUTLASS a part's rows are steps
// along a longer K. A step of a part fills the weight's place in the pipeline with 64 rows of it,
// columns contiguous, and leaves x's place as it is; the warpgroup whose rows they are multiplies
// them by the identity, the other only passes the step on.
template <class Base>
struct AddingMainloop : Base {
  using Element = typename Base::ElementB;
  using TileShape = typename Base::TileShape;
  static constexpr int kColumns = cute::size<1>(TileShape{}), kStep = cute::size<2>(TileShape{});
  static constexpr int kStages = Base::DispatchPolicy::Stages;
  static constexpr int kStepsOfPart = cute::size<0>(TileShape{}) / kStep;
  static constexpr int kWarpgroup = 128;
  static_assert(kStep == 64 && kStepsOfPart == 2);
  static_assert(kMaxGpus * AddingKernel::kMostPieces <= 32);

  using PartLayout = decltype(cute::tile_to_shape(
      cute::GMMA::Layout_MN_SW128_Atom<Element>{},
      cute::Shape<cute::Int<kColumns>, cute::Int<kStep>, cute::Int<kStages>>{},
      cute::Step<cute::_2, cute::_1, cute::_3>{}));
  using IdentityLayout = decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Element>{},
                                                      cute::Shape<cute::_64, cute::_64>{}));
  using PartMma = decltype(cute::make_tiled_mma(
      cute::SM90::GMMA::MMA_64x256x16_F32BF16BF16_SS<cute::GMMA::Major::K,
                                                     cute::GMMA::Major::MN>{}));
  static_assert(kColumns == 256);
  static_assert(cute::cosize_v<PartLayout> <= cute::cosize_v<typename Base::SmemLayoutB>);
  using PartStride = cutlass::detail::TagToStrideB_t<cutlass::layout::RowMajor>;
  using Bits = cute::uint_bit_t<cute::sizeof_bits_v<Element>>;

  static auto part_copy(const void* parts, int64_t rows, int64_t n) {
    const auto stride = cutlass::make_cute_packed_stride(PartStride{}, {int(n), int(rows), 1});
    return cute::make_tma_copy_B_sm90(
        cute::SM90_TMA_LOAD{},
        cute::make_tensor(static_cast<const Bits*>(parts),
                          cute::make_layout(cute::make_shape(int(n), int(rows), 1), stride)),
        PartLayout{}(cute::_, cute::_, cute::Int<0>{}), TileShape{},
        cute::Shape<cute::_1, cute::_1, cute::_1>{});
  }
  using PartCopy = decltype(part_copy(nullptr, 0, 0));

  struct Arguments : Base::Arguments {
    AddingJob job;
  };
  struct Params : Base::Params {
    PartCopy part_copy;
    int n, rows, sources, rank;
    int steps;  // along K
    int tiles;  // rows of them
    int pieces;
    const uint64_t* arrived;
    const uint64_t* epoch;
    Watch watch;
  };
  struct TensorStorage : Base::TensorStorage {
    alignas(1024) Element identity[cute::cosize_v<IdentityLayout>];
  };

  static int steps_of(const AddingJob& job) { return int((job.k + kStep - 1) / kStep); }
  /// What CUTLASS takes for K.
  static int whole_k(const AddingJob& job) {
    return (steps_of(job) + job.sources * kStepsOfPart) * kStep;
  }

  template <class Problem>
  static Params to_underlying_arguments(Problem const& problem, Arguments const& arguments,
                                        void* workspace) {
    const AddingJob& job = arguments.job;
    Problem own = problem;
    cute::get<2>(own) = int(job.k);
    return {Base::to_underlying_arguments(own, arguments, workspace),
            part_copy(job.parts, job.rows * job.sources, job.n),
            int(job.n),
            int(job.rows),
            job.sources,
            job.rank,
            steps_of(job),
            int(job.rows / cute::size<0>(TileShape{})),
            job.pieces,
            job.arrived,
            job.epoch,
            job.watch};
  }
  template <class Problem>
  static bool can_implement(Problem const& problem, Arguments const& arguments) {
    Problem own = problem;
    cute::get<2>(own) = int(arguments.job.k);
    return Base::can_implement(own, arguments);
  }
  CUTLASS_DEVICE static void prefetch_tma_descriptors(Params const& params) {
    Base::prefetch_tma_descriptors(params);
    cute::prefetch_tma_descriptor(params.part_copy.get_tma_descriptor());
  }

  template <class Inputs, class Iterator, class Coordinates>
  CUTLASS_DEVICE void load(Params const& params, typename Base::MainloopPipeline pipeline,
                           typename Base::PipelineState state, Inputs const& inputs,
                           Coordinates const& at, Iterator, int, int thread,
                           uint32_t rank_in_cluster, TensorStorage& tensors) {
    using namespace cute;
    const int row = int(get<0>(at)), column = int(get<1>(at));
    Tensor all =
        params.part_copy.get_tma_tensor(make_shape(params.n, params.rows * params.sources, 1));
    Tensor tiles = local_tile(all, Shape<Int<kColumns>, Int<kStep>>{}, make_coord(_, _, _));
    auto copier = params.part_copy.get_slice(0);
    Tensor from = copier.partition_S(tiles(_, _, column, _, 0));
    Tensor to = copier.partition_D(make_tensor(make_smem_ptr(tensors.smem_B.data()), PartLayout{}));
    const schedule::AddingOrder order = order_of(params);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int part = 0, step = 0; part < order.parts; ++part) {
      const int until = schedule::steps_before(order, part), source = part / kStepsOfPart;
      const int place = source * (params.rows / kStep) + row * kStepsOfPart + part % kStepsOfPart;
      Base::load(params, pipeline, state, inputs, at, LoadStep{step}, until - step, thread,
                 rank_in_cluster, tensors);
      state.advance(until - step);
      step = until;
      await(params, source, row);
      if (elect_one_sync()) {
        pipeline.producer_acquire(state);
        auto* barrier = pipeline.producer_get_barrier(state);
        // Of x nothing comes.
        cutlass::arch::ClusterTransactionBarrier::complete_transaction(
            barrier, block_rank_in_cluster(), Base::TmaTransactionBytesMK);
        copy(params.part_copy.with(*barrier, 0), from(_, _, _, place), to(_, _, _, state.index()));
      }
      __syncwarp();
      ++state;
    }
  }

  template <class Accumulators>
  CUTLASS_DEVICE void mma(typename Base::MainloopPipeline pipeline,
                          typename Base::PipelineState reading, Accumulators& accumulators, int,
                          int thread, TensorStorage& tensors, Params const& params) {
    using namespace cute;
    const int group = __shfl_sync(0xffffffff, thread / kWarpgroup, 0);
    if (!has_identity_) make_identity(tensors, thread);
    has_identity_ = true;

    Tensor sA = make_tensor(make_smem_ptr(tensors.smem_A.data()), typename Base::SmemLayoutA{});
    Tensor sB = make_tensor(make_smem_ptr(tensors.smem_B.data()), typename Base::SmemLayoutB{});
    typename Base::TiledMma product;
    auto of_product = product.get_slice(group * kWarpgroup);
    Tensor x = of_product.make_fragment_A(of_product.partition_A(sA));
    Tensor weight = of_product.make_fragment_B(of_product.partition_B(sB));

    Tensor sI = make_tensor(make_smem_ptr(tensors.identity), IdentityLayout{});
    Tensor sP = make_tensor(make_smem_ptr(tensors.smem_B.data()), PartLayout{});
    PartMma addition;
    auto of_addition = addition.get_slice(0);
    Tensor identity = of_addition.make_fragment_A(of_addition.partition_A(sI));
    Tensor rows = of_addition.make_fragment_B(of_addition.partition_B(sP));
    CUTE_STATIC_ASSERT_V(size(accumulators) == Int<64 * kColumns / kWarpgroup>{});

    auto releasing = reading;
    const auto await = [&] {
      auto token = pipeline.consumer_try_wait(reading);
      pipeline.consumer_wait(reading, token);
    };
    // The step before the one that has just been issued is complete.
    const auto release = [&] {
      warpgroup_commit_batch();
      warpgroup_wait<1>();
      warpgroup_fence_operand(accumulators);
      pipeline.consumer_release(releasing);
      ++releasing;
      ++reading;
    };

    warpgroup_fence_operand(accumulators);
    await();
    warpgroup_arrive();
    product.accumulate_ = GMMA::ScaleOut::Zero;
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < size<2>(x); ++k) {
      cute::gemm(product, x(_, _, k, reading.index()), weight(_, _, k, reading.index()),
                 accumulators);
      product.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
    ++reading;
    addition.accumulate_ = GMMA::ScaleOut::One;

    const schedule::AddingOrder order = order_of(params);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int part = 0, step = 1; part < order.parts; ++part) {
      const int until = schedule::steps_before(order, part);
      CUTLASS_PRAGMA_NO_UNROLL
      for (; step < until; ++step) {
        await();
        warpgroup_fence_operand(accumulators);
        warpgroup_arrive();
        cute::gemm(product, x(_, _, _, reading.index()), weight(_, _, _, reading.index()),
                   accumulators);
        release();
      }
      await();
      warpgroup_fence_operand(accumulators);
      if (part % kStepsOfPart == group) {
        warpgroup_arrive();
        cute::gemm(addition, identity, rows(_, _, _, reading.index()), accumulators);
      }
      release();
    }
    warpgroup_fence_operand(accumulators);
  }

 private:
  CUTLASS_DEVICE static schedule::AddingOrder order_of(Params const& params) {
    return {params.steps, params.sources * kStepsOfPart};
  }

  CUTLASS_DEVICE void await(Params const& params, int source, int row) {
    const int signal = source * AddingKernel::kMostPieces + row * params.pieces / params.tiles;
    const unsigned bit = 1u << signal;
    if (here_ & bit) return;
    wait_for_load(params.arrived + signal, *static_cast<const volatile uint64_t*>(params.epoch),
                  params.watch, OpId::gemm_rs,
                  schedule::rs_source(params.rank, params.sources + 1, source), row);
    __syncwarp();
    here_ |= bit;
  }

  CUTLASS_DEVICE static void make_identity(TensorStorage& tensors, int thread) {
    auto identity = cute::make_tensor(cute::make_smem_ptr(tensors.identity), IdentityLayout{});
    for (int i = thread; i < 64 * 64; i += 2 * kWarpgroup) {
      identity(i / 64, i % 64) = Element(i / 64 == i % 64 ? 1.f : 0.f);
    }
    // wgmma reads through another path.
    cutlass::arch::fence_view_async_shared();
    cutlass::arch::NamedBarrier::sync(2 * kWarpgroup, 0);
  }

  unsigned here_ = 0;  // pieces seen to have arrived, by bit of their signal
  bool has_identity_ = false;
};

class Adding final : public AddingKernel {
  static constexpr int kColumns = 256;
  using Element = cutlass::bfloat16_t;
  using TileShape = cute::Shape<cute::_128, cute::Int<kColumns>, cute::_64>;
  using ClusterShape = cute::Shape<cute::_2, cute::_1, cute::_1>;
  using Row = cutlass::layout::RowMajor;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, TileShape, ClusterShape,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, Row, 8, Element, Row, 8,
      cutlass::epilogue::TmaWarpSpecializedCooperative>::CollectiveOp;
  static constexpr int kIdentityBytes = 64 * 64 * sizeof(Element) + 1024;
  using Mainloop = AddingMainloop<typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, Row, 8, Element,
      cutlass::layout::ColumnMajor, 8, float, TileShape, ClusterShape,
      cutlass::gemm::collective::StageCountAutoCarveout<int(
          sizeof(typename Epilogue::SharedStorage) + kIdentityBytes)>,
      cutlass::gemm::KernelTmaWarpSpecializedCooperative>::CollectiveOp>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<cutlass::gemm::kernel::GemmUniversal<
      cute::Shape<int, int, int, int>, Mainloop, Epilogue, TileOrderTag<schedule::RsTileOrder>>>;
  using GemmKernel = typename Gemm::GemmKernel;
  static_assert(GemmKernel::SharedStorageSize <=
                cutlass::gemm::collective::detail::sm90_smem_capacity_bytes);
  static_assert(Mainloop::DispatchPolicy::Stages >= 4);

 public:
  void launch(const AddingJob& job, cudaStream_t stream) override {
    if (!same(job)) prepare(job);
    // CUTLASS asks the device's limits once; later launches only enqueue.
    if (Gemm::run(params_, stream) != cutlass::Status::kSuccess) check_launch("adding gemm_rs");
  }

 private:
  bool same(const AddingJob& job) const {
    return prepared_ && job.x == last_.x && job.weight == last_.weight && job.out == last_.out &&
           job.pieces == last_.pieces && job.watch.deadline_ns == last_.watch.deadline_ns;
  }

  void prepare(const AddingJob& job) {
    typename Gemm::Arguments arguments{};
    set_operands<Gemm>(arguments, job.rows, job.n, job.k, job.x, job.weight);
    set_output<Gemm>(arguments, job.rows, job.n, job.out);
    cute::get<2>(arguments.problem_shape) = Mainloop::whole_k(job);
    arguments.mainloop.job = job;
    // In pairs of rows of tiles, piece by piece, about 2,048 rows of one swept together.
    const int pairs = int(job.rows) / kRows;
    int band = pairs / job.pieces;
    while (band * kRows > 2048 && band % 2 == 0) band /= 2;
    const int columns = int((job.n + kColumns - 1) / kColumns);
    const schedule::RsTileOrder order{0, 1, pairs, columns, band, band};
    arguments.scheduler.order = order;
    params_ = set_up<Gemm>(arguments, "gemm_rs: the adding kernel");
    last_ = job;
    prepared_ = true;
  }

  typename Gemm::Params params_{};
  AddingJob last_{};
  bool prepared_ = false;
};

}  // namespace tandem::gpu::fused
