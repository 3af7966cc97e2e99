// A toy parallel axis, outside all others: whole copies of the model, whose gradients are summed.
// Two files add it, this one and CMakeLists.txt, as ParallelGroups accepts any communicator as its
// world. An axis inside the others takes five: engine/parallel/dims.{h,cc} (Axis, kNumAxes and a
// size), its key in engine/parallel/config.{h,cc}, and its test.
#include <gtest/gtest.h>

#include <memory>

#include "engine/parallel/dims.h"
#include "tandem/collectives.h"

namespace tandem {
namespace {

class Copies {
 public:
  Copies(Communicator& world, const ParallelDims& inner)
      : index(world.rank() / inner.ranks()),
        copy(world.split(index, world.rank())),
        across(world.split(world.rank() % inner.ranks(), index)),
        groups(*copy, inner, true) {}

  int index;
  std::unique_ptr<Communicator> copy;    ///< world of the inner axes
  std::unique_ptr<Communicator> across;  ///< ranks that differ only in the copy
  ParallelGroups groups;
};

float sum_along(Communicator& comm, float value) {
  all_reduce(comm, Tensor(&value, DType::f32, {1}));
  return value;
}

TEST(NewAxis, GroupsOfAllAxesPartitionTheWorld) {
  for (const ParallelDims& inner :
       {ParallelDims(1, 2), ParallelDims(2, 1), ParallelDims(1, 2, 2)}) {
    WorldOptions options;
    options.ranks = 2 * inner.ranks();
    run_threads(options, [&](Communicator& world) {
      const Copies copies(world, inner);
      const auto& groups = copies.groups;
      EXPECT_EQ(copies.across->size(), 2);
      EXPECT_EQ(copies.across->rank(), copies.index);
      EXPECT_EQ(groups.world().size(), inner.ranks());
      EXPECT_EQ(groups.tp().size(), inner.tp());
      EXPECT_EQ(groups.copies().size(), inner.dp());
      EXPECT_EQ(groups.experts()->size(), inner.tp() * inner.ep());
      // Sums along the axes one after the other are a sum over the world.
      float sum = float(1 << world.rank());
      for (Communicator* axis : groups.world_axes()) sum = sum_along(*axis, sum);
      EXPECT_EQ(sum_along(*copies.across, sum), float((1 << world.size()) - 1));
    });
  }
}

}  // namespace
}  // namespace tandem
