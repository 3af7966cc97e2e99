// Test values for codecs, and the bounds of their errors.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "tandem/codec.h"
#include "tandem/error.h"
#include "tandem/random.h"

namespace tandem::test {

/// Every wire format that deserves a separate test.
inline std::vector<std::string> all_wires() {
  std::vector<std::string> all{"mxfp8", "mxfp6", "mxfp4"};
  for (const char* codec : {"e4m3", "e5m2"}) {
    for (const char* rest : {"", ":g16", ":g32", ":g64", ":f32", ":log2", ":g32:log2"}) {
      all.push_back(codec + std::string(rest));
    }
  }
  for (const char* codec : {"int8", "int6", "int5", "int4", "int3", "int2"}) {
    for (const char* rest :
         {"", ":g16", ":g32", ":g64:f32", ":log2", ":asym", ":g32:asym:f32", ":g64:asym:log2"}) {
      all.push_back(codec + std::string(rest));
    }
  }
  for (const char* text : {"int4:g32:hadamard", "int4:hadamard", "int2:g64:asym:spikes",
                           "int3:spikes", "int2:g16:log2:spikes", "int3:g32:asym:hadamard"}) {
    all.push_back(text);
  }
  return all;
}

struct Input {
  std::string name;
  std::vector<float> values;
};

inline float uniform(uint64_t stream, int64_t i) {
  return float(int32_t(philox(24, stream, uint64_t(i))[0])) * 0x1p-31f;
}

inline std::vector<float> uniform_values(uint64_t stream, int64_t count) {
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i) values.push_back(uniform(stream, i));
  return values;
}

/// Finite values of every kind that is difficult for some format.
inline std::vector<Input> finite_inputs(int64_t count) {
  std::vector<Input> all;
  const auto make = [&](const char* name, auto value) {
    Input input{name, std::vector<float>(size_t(count))};
    for (int64_t i = 0; i < count; ++i) input.values[size_t(i)] = value(i);
    all.push_back(input);
  };
  const float maximum = 0x1.fep127f;
  make("uniform", [](int64_t i) { return uniform(1, i); });
  make("cubes", [](int64_t i) { return 100 * std::pow(uniform(2, i), 3.0f); });
  make("outliers", [](int64_t i) { return uniform(3, i) * (i % 61 == 7 ? 75000.0f : 1.0f); });
  make("any exponent", [](int64_t i) {
    return std::ldexp(uniform(4, i), int(philox(24, 5, uint64_t(i))[1] % 250) - 124);
  });
  make("zeros", [](int64_t i) { return i % 2 ? -0.0f : 0.0f; });
  make("equal", [](int64_t) { return -1.2345678f; });
  make("one of all", [](int64_t i) { return i % 128 == 5 ? 3.0f : 0.0f; });
  make("offset", [](int64_t i) { return 1000 + uniform(6, i); });
  make("small", [](int64_t i) { return uniform(7, i) * 0x1p-118f; });
  make("subnormal", [](int64_t i) { return uniform(8, i) * 0x1p-130f; });
  make("largest", [=](int64_t i) { return i % 3 ? maximum * uniform(9, i) : maximum; });
  make("both ends", [=](int64_t i) { return i % 2 ? maximum : -maximum; });
  make("halves", [](int64_t i) { return float(i % 255 - 127) + 0.5f; });
  return all;
}

/// finite_inputs() and one input with infinities and NaN.
inline std::vector<Input> any_inputs(int64_t count) {
  std::vector<Input> all = finite_inputs(count);
  Input not_finite{"not finite", std::vector<float>(size_t(count), 1.0f)};
  for (size_t i = 0; i < not_finite.values.size(); i += 97) {
    not_finite.values[i] =
        i % 2 ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
  }
  all.push_back(not_finite);
  return all;
}

/// Message of the InvalidArgument that a call throws.
template <typename Call>
std::string refusal_of(const Call& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace tandem::test
