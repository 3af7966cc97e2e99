// Conditions that keep a rank from joining a world made from the caller's ncclComm_t.
#include "comm/device/adopted_nccl.h"

#include <gtest/gtest.h>

#include <string>

namespace tandem::test {
namespace {

AdoptedNccl of_four() {
  AdoptedNccl adopted;
  adopted.size = 4;
  adopted.device = adopted.current_device = adopted.stream_device = 1;
  return adopted;
}

TEST(AdoptedNccl, MatchingOptionsAreAccepted) {
  EXPECT_EQ(refusal_of(of_four(), {}, nullptr), "");
  EXPECT_EQ(refusal_of(of_four(), {.ranks = 4}, nullptr), "");
}

TEST(AdoptedNccl, OptionsMustMatchTheCommunicator) {
  EXPECT_EQ(refusal_of(of_four(), {.ranks = 3}, nullptr),
            "ranks 3: the communicator has 4: expected 4 or none given");
  EXPECT_EQ(refusal_of(of_four(), {.ranks_per_gpu = 2}, nullptr),
            "2 ranks a GPU: expected 1, as NCCL's ranks have a GPU each");
  WorldOptions linked;
  linked.link = EmulatedLink::parse("1GB/s,5us");
  EXPECT_EQ(refusal_of(of_four(), linked, nullptr),
            "link 'emulated 1 GB/s 5 us': expected none: only ranks that share a GPU emulate one");
}

TEST(AdoptedNccl, DeviceAndStreamMustMatchTheCommunicator) {
  AdoptedNccl adopted = of_four();
  adopted.current_device = 0;
  EXPECT_EQ(refusal_of(adopted, {}, nullptr),
            "the current device is cuda:0: expected the communicator's, cuda:1");
  adopted = of_four();
  adopted.stream_device = 2;
  EXPECT_EQ(refusal_of(adopted, {}, nullptr),
            "a stream of cuda:2: expected one of the communicator's GPU, cuda:1");
  adopted = of_four();
  adopted.captured = true;
  EXPECT_EQ(refusal_of(adopted, {}, nullptr),
            "a stream that is captured into a graph: expected it before or after");
}

TEST(AdoptedNccl, MulticastIsRefusedUnlessOff) {
  AdoptedNccl adopted = of_four();
  adopted.multicast = true;
  const std::string why =
      ", and this GPU has NVLink multicast, which stays off: expected 0 in the environment before "
      "NCCL's first call";
  EXPECT_EQ(refusal_of(adopted, {}, nullptr), "NCCL_NVLS_ENABLE is not set" + why);
  EXPECT_EQ(refusal_of(adopted, {}, ""), "NCCL_NVLS_ENABLE is not set" + why);
  EXPECT_EQ(refusal_of(adopted, {}, "2"), "NCCL_NVLS_ENABLE is 2" + why);
  EXPECT_EQ(refusal_of(adopted, {}, "0"), "");
  EXPECT_EQ(refusal_of(adopted, {}, "0x0"), "");
  adopted.size = 1;
  EXPECT_EQ(refusal_of(adopted, {}, nullptr), "") << "nobody to cast to";
}

}  // namespace
}  // namespace tandem::test
