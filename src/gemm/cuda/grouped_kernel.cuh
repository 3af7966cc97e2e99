// The host's side of grouped_block.cuh.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "gemm/cuda/grouped_block.cuh"
#include "gemm/cuda/product_launch.cuh"

namespace tandem::gpu::fused {

template <class Operand, class Element, class Form>
class Grouped final : public GroupedGemm {
  using Block = GroupedBlock<Operand, Element, Form>;
  static constexpr const char* kName = "grouped GEMM";

 public:
  explicit Grouped(const GroupedShape& shape)
      : shape_(shape),
        blocks_(resident_clusters<Block>(kName)),
        column_tiles_(parts(shape.columns, Block::kStoredColumns)) {
    add_table({});
  }

  int add_table(const GroupedCut& cut) override {
    GroupedTable table;
    table.row_tiles = Block::kCluster;
    table.first_column = cut.first_column;
    table.column_tiles = cut.column_tiles ? cut.column_tiles : column_tiles_ - cut.first_column;
    table.staged = cut.staged;
    table.tiles = cut.tiles;
    // The store of the tile before is hidden under so many k-blocks; those past K read zeros.
    table.steps = std::max(parts(shape_.k, Block::kStepOfK), int(Block::kLead));
    const int row_works =
        schedule::most_group_tiles(shape_.rows, shape_.groups, Block::kCluster * Block::kTileRows);
    const int64_t tiles = int64_t(row_works) * table.column_tiles;
    const int early = std::max(1, blocks_ - parts(cut.spare_blocks, Block::kCluster));
    const int rounds = std::min(cut.joining_after, parts(tiles, early));
    table.turns = {rounds > 0 ? blocks_ : early, early, rounds};
    table.works_of_block = rounds + parts(tiles, table.turns.blocks) + 1;
    works_.emplace_back(size_t(table.turns.blocks) * size_t(table.works_of_block) *
                        sizeof(schedule::GroupedWork));
    table.works = reinterpret_cast<schedule::GroupedWork*>(works_.back().data());
    if (cut.ordered) {
      works_.emplace_back(size_t(row_works + 2) * sizeof(schedule::RowTurn));
      table.order = reinterpret_cast<schedule::RowTurn*>(works_.back().data());
    }
    tables_.push_back(table);
    return int(tables_.size()) - 1;
  }
  const GroupedTable& table(int number) const override { return tables_[size_t(number)]; }

  void launch(const GroupedJob& job, cudaStream_t stream, int number) override {
    if constexpr (Block::kFp8) check_scaled(job);
    if constexpr (Block::kGathers) check_gathered(job);
    if (shape_.rows == 0) return;
    const Addresses addresses{job.x, job.weight, job.out};
    if (!last_ || !(addresses == *last_)) {
      prepare(job);
      last_ = addresses;
    }
    const GroupedTable& table = tables_[size_t(number)];
    params_.works = table.works;
    params_.works_of_cluster = table.works_of_block;
    params_.own = static_cast<const std::byte*>(job.own ? job.own : job.x);
    params_.source = job.source;
    params_.gate = job.gate;
    params_.ready = job.ready;
    if constexpr (Block::kFp8) params_.scales = job.scales;
    launch_product<Block>(params_, table.turns.blocks, kName, stream, job.beside || job.ready);
  }

 private:
  struct Addresses {
    const void *x, *weight, *out;
    bool operator==(const Addresses&) const = default;
  };

  static int parts(int64_t all, int part) { return int((all + part - 1) / part); }

  static void check_scaled(const GroupedJob& job) {
    if (!job.scales.x || !job.scales.weight) {
      throw InvalidArgument(
          "grouped GEMM: scales: expected those of e4m3 rows of x and the weight");
    }
    if (job.own || job.gate.arrived || job.ready) {
      throw InvalidArgument("grouped GEMM: e4m3 rows: expected all of them in x, before the call");
    }
  }

  static void check_gathered(const GroupedJob& job) {
    if (job.ready || job.beside) {
      throw InvalidArgument("grouped GEMM: beside another kernel: expected sorted rows");
    }
  }

  void prepare(const GroupedJob& job) {
    if (!Block::kGathers) {
      params_.x = map_of<Operand>(job.x, shape_.padded_rows(), shape_.k, Block::kTileRows);
    }
    params_.weight =
        Block::kTransposes
            ? map_matrices(job.weight, dtype_of<Operand>(), shape_.groups, shape_.k, shape_.columns,
                           Block::kStepOfK)
            : map_of<Operand>(job.weight, shape_.weight_rows(), shape_.k, Block::kHalf);
    params_.out = map_of<Element>(job.out, shape_.padded_rows(), shape_.columns, Block::kGroupRows);
    params_.group_rows = int(shape_.weight_rows() / shape_.groups);
    params_.no_row = shape_.row_tiles();
    params_.to_high = Block::kGates ? int(shape_.columns) : Block::kHalf;
    params_.alternates = !shape_.fixed_order;
    params_.rows = static_cast<const std::byte*>(job.x);
    params_.row_bytes = shape_.k * int64_t(sizeof(Operand));
    if constexpr (Block::kFp8) params_.columns = int(shape_.columns);
  }

  GroupedShape shape_;
  int blocks_, column_tiles_;  // blocks: or pairs
  std::vector<GroupedTable> tables_;
  std::vector<DeviceMemory> works_;  ///< and orders
  typename Block::Params params_{};
  std::optional<Addresses> last_;  // what params_ are of
};

template <class Operand, class Element, bool kPairs>
std::unique_ptr<GroupedGemm> make_grouped(const GroupedShape& shape) {
  const auto make = [&]<bool kGathers, bool kGates, bool kTransposes>() {
    using Form = GroupedForm<kGathers, kGates, kTransposes, kPairs>;
    return std::unique_ptr<GroupedGemm>(std::make_unique<Grouped<Operand, Element, Form>>(shape));
  };
  if constexpr (!WarpgroupProduct<Operand>::kFp8) {
    if (shape.transposed) return make.template operator()<false, false, true>();
  }
  if constexpr (!kPairs) {
    if (shape.gathered) {
      if (shape.gated) return make.template operator()<true, true, false>();
      return make.template operator()<true, false, false>();
    }
  }
  if (shape.gated) return make.template operator()<false, true, false>();
  return make.template operator()<false, false, false>();
}

}  // namespace tandem::gpu::fused
