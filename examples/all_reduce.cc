// A collective: the gradients of four ranks are summed in place. Sums use a fixed rank order, so
// all ranks have equal bits, in every run.
#include <cstdio>
#include <cstring>
#include <vector>

#include "tandem/tandem.h"

int main() {
  constexpr int64_t kElements = 1000;
  bool correct = true;
  tandem::WorldOptions options;
  if (!tandem::launched()) options.ranks = 4;

  tandem::run_world(options, [&](tandem::Communicator& comm) {
    std::vector<float> gradient(kElements);
    for (int64_t i = 0; i < kElements; ++i) {
      gradient[size_t(i)] = tandem::uniform(/*seed=*/1, uint64_t(comm.rank()), uint64_t(i));
    }
    tandem::all_reduce(comm, {gradient.data(), tandem::DType::f32, {kElements}});

    // Every rank compares its bits with those of rank 0.
    std::vector<float> of_rank_0 = gradient;
    tandem::broadcast(comm, {of_rank_0.data(), tandem::DType::f32, {kElements}}, /*root=*/0);
    const bool same =
        std::memcmp(gradient.data(), of_rank_0.data(), kElements * sizeof(float)) == 0;

    float expected = 0;
    for (int rank = 0; rank < comm.size(); ++rank) {
      expected += tandem::uniform(1, uint64_t(rank), 0);
    }
    if (!same || gradient[0] != expected) correct = false;
    if (comm.rank() == 0) {
      std::printf("%d ranks: first element %.9g, expected %.9g; bitwise equal: %s\n", comm.size(),
                  double(gradient[0]), double(expected), same ? "yes" : "no");
    }
  });
  return correct ? 0 : 1;
}
