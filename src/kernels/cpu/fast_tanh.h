// Hyperbolic tangent as loops of kernels take it.
#pragma once

namespace tandem::cpu {

/// tanh(x) within 8 ulp: a quotient of polynomials (Eigen's), which vectorises.
inline float fast_tanh(float x) {
  constexpr float kBound = 7.90531111f;  // where the quotient is 1
  x = x < -kBound ? -kBound : x;
  x = x > kBound ? kBound : x;
  const float s = x * x;
  float p = -2.76076847742355e-16f;
  p = p * s + 2.00018790482477e-13f;
  p = p * s + -8.60467152213735e-11f;
  p = p * s + 5.12229709037114e-08f;
  p = p * s + 1.48572235717979e-05f;
  p = p * s + 6.37261928875436e-04f;
  p = p * s + 4.89352455891786e-03f;
  float q = 1.19825839466702e-06f;
  q = q * s + 1.18534705686654e-04f;
  q = q * s + 2.26843463243900e-03f;
  q = q * s + 4.89352518554385e-03f;
  return x * p / q;
}

}  // namespace tandem::cpu
