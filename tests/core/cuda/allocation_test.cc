// Identity of an allocation, which differs between allocations at the same address.
#include "core/cuda/allocation.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "tests/core/cuda/renewed_memory.h"
#include "tests/gpu/gpu_ranks.h"

namespace tandem::test {
namespace {

using gpu::allocation_of;

class Allocation : public OnGpus {};

constexpr size_t kMiB = size_t(1) << 20;

TEST_P(Allocation, ReusedAddressHasAnotherIdentity) {
  run([](gpu::GpuCommunicator&) {
    for (const From from : kEveryAllocation) {
      for (const size_t bytes : {size_t(1000), 6 * kMiB}) {
        std::set<const void*> addresses;
        std::set<uint64_t> identities;
        RenewedMemory memory(from, bytes);
        constexpr size_t kTimes = 12;
        for (size_t i = 0; i < kTimes; ++i) {
          addresses.insert(memory.data());
          const uint64_t identity = allocation_of(memory.data(), bytes);
          EXPECT_NE(identity, 0u) << name_of(from);
          EXPECT_TRUE(identities.insert(identity).second) << name_of(from) << " " << identity;
          memory.renew();
        }
        EXPECT_LT(addresses.size(), kTimes) << name_of(from) << ": no address came again";
      }
    }
  });
}

TEST_P(Allocation, IdentityIsEqualAtEveryAddressWithin) {
  run([](gpu::GpuCommunicator&) {
    for (const From from : kEveryAllocation) {
      const RenewedMemory memory(from, 6 * kMiB), other(from, 6 * kMiB);
      const auto* bytes = static_cast<const std::byte*>(memory.data());
      const uint64_t all = allocation_of(bytes, 6 * kMiB);
      EXPECT_EQ(allocation_of(bytes, 1), all) << name_of(from);
      EXPECT_EQ(allocation_of(bytes + 4 * kMiB + 12, kMiB), all) << name_of(from);
      EXPECT_NE(allocation_of(other.data(), 1), all) << name_of(from);
    }
  });
}

TEST_P(Allocation, MemoryThatIsNotOneAllocationHasNoIdentity) {
  run([](gpu::GpuCommunicator&) {
    const std::vector<std::byte> ours(100);
    EXPECT_EQ(allocation_of(ours.data(), ours.size()), 0u);
    const Mapping mapping;
    const size_t each = mapping.granularity();
    const CUdeviceptr at = mapping.reserve(2 * each);
    const auto* memory = reinterpret_cast<const std::byte*>(at);
    for (const size_t half : {size_t(0), each}) mapping.map(at + half, each);
    EXPECT_EQ(allocation_of(memory, 2 * each), 0u);
    EXPECT_EQ(allocation_of(memory + each - 1, 2), 0u);
    EXPECT_NE(allocation_of(memory, each), allocation_of(memory + each, each));
    for (const size_t half : {size_t(0), each}) mapping.unmap(at + half, each);
    mapping.release(at, 2 * each);
  });
}

INSTANTIATE_TEST_SUITE_P(Gpu, Allocation, testing::Values(1, 2, 4), gpus_name);

}  // namespace
}  // namespace tandem::test
