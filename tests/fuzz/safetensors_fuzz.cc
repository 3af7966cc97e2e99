// Header of a safetensors file: an IoError, or tensors that tile the data.
#include <cstdint>
#include <span>

#include "core/formats/safetensors.h"
#include "tandem/error.h"
#include "tests/fuzz/require.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const auto header = tandem::parse_safetensors_header(std::as_bytes(std::span(data, size)), size,
                                                         "fuzz.safetensors");
    REQUIRE(header.data_begin <= size);
    for (const auto& entry : header.entries) {
      REQUIRE(entry.begin <= entry.end && entry.end <= size - header.data_begin);
      REQUIRE(uint64_t(entry.elements()) * tandem::size_of(entry.dtype) == entry.end - entry.begin);
    }
  } catch (const tandem::IoError&) {
  }
  return 0;
}
