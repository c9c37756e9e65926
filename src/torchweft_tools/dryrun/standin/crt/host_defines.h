/* The wheels of the CUDA headers leave this file to the compiler's wheel. The stand-in is plain C:
 * every note to the device compiler is empty here. */
#pragma once
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __noinline__ __attribute__((noinline))
#define __no_return__ __attribute__((noreturn))
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __location__(a)
#define __annotate__(a)
#define CUDARTAPI
#define CUDARTAPI_CDECL
