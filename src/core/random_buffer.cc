#include "core/random_buffer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "tandem/error.h"
#include "tandem/random.h"

namespace tandem {

Memory random_buffer(DType dtype, int64_t elements, uint64_t seed) {
  if (dtype != DType::f32 && dtype != DType::bf16 && dtype != DType::e4m3) {
    throw InvalidArgument(
        fmt::format("random buffer of {}: expected f32, bf16 or e4m3", name_of(dtype)));
  }
  constexpr int64_t kPeriod = 4096;
  Memory memory(size_t(elements) * size_of(dtype));
  const int64_t first = std::min(elements, kPeriod);
  for (int64_t i = 0; i < first; ++i) {
    const float value = uniform(seed, 0, uint64_t(i)) * 2 - 1;
    if (dtype == DType::f32) {
      reinterpret_cast<float*>(memory.data())[i] = value;
    } else if (dtype == DType::e4m3) {
      reinterpret_cast<Float8E4M3*>(memory.data())[i] = Float8E4M3::from_float(value);
    } else {
      reinterpret_cast<BFloat16*>(memory.data())[i] = BFloat16::from_float(value);
    }
  }
  for (int64_t done = first; done < elements;) {
    const int64_t more = std::min(done, elements - done);
    std::memcpy(memory.data() + size_t(done) * size_of(dtype), memory.data(),
                size_t(more) * size_of(dtype));
    done += more;
  }
  return memory;
}

}  // namespace tandem
