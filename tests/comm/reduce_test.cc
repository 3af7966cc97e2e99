// Sums and maxima over ranks of values that are NaN.
#include <cmath>

#include "tandem/collectives.h"
#include "tests/comm/ranks.h"

namespace tandem::test {
namespace {

class Reduction : public OnRanks {};
TANDEM_INSTANTIATE(Reduction);

TEST_P(Reduction, NaNWinsAMaxOnAnyRank) {
  run([&](Communicator& comm) {
    for (const ReduceOp op : {ReduceOp::max, ReduceOp::sum}) {
      for (const size_t size : {3, 10007}) {
        for (int owner = 0; owner < comm.size(); ++owner) {
          std::vector<float> data(size, float(comm.rank()));
          if (comm.rank() == owner) data.back() = std::nanf("");
          all_reduce(comm, Tensor(data.data(), DType::f32, {int64_t(size)}), op);
          EXPECT_TRUE(std::isnan(data.back())) << "of rank " << owner;
          EXPECT_FALSE(std::isnan(data.front())) << "of rank " << owner;
        }
      }
    }
  });
}

}  // namespace
}  // namespace tandem::test
