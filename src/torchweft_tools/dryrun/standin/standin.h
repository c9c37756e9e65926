/* What the files of the stand-in share. The prototypes are those of the installed headers: a
 * function of ours with another one does not compile. */
#pragma once
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Half-precision types by hand: their own headers need the device compiler's. */
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_RUNTIME_H__
typedef struct { unsigned short x; } __half;
typedef struct { unsigned short x; } __nv_bfloat16;
typedef struct { __half x, y; } __half2;
#include <cuda_runtime_api.h>
#include <cublas_v2.h>
#include <cublasLt.h>
#include <nccl.h>

#define MAX_STREAMS 1024
#define EXPORT __attribute__((visibility("default")))

/* How far streams are known to be: seen[i] operations of stream i come before what follows. */
typedef struct { uint64_t seen[MAX_STREAMS]; } Clock;

typedef struct Node { /* what a launch of a graph does again, on the host */
  struct Node *next;
  void *dst; const void *src; size_t bytes;
  cudaHostFn_t function; void *argument;
} Node;

typedef struct Graph {
  int id, num_nodes, invalid, ended;
  struct Stream *origin;
  pthread_t thread;
  enum cudaStreamCaptureMode mode;
  Node *first, **last;
} Graph;

typedef struct Stream {
  int id, device, priority, blocking;
  int num_polls;
  uint64_t position, captured;  /* operations so far; of them in the present capture */
  Graph *capture;
  Clock clock, capture_clock;
} Stream;

typedef struct Event {
  int id, num_polls, is_recorded;
  Stream *stream;
  Graph *graph;        /* of the capture in which it was last recorded */
  uint64_t tick;
  Clock *clock;
} Event;

extern pthread_mutex_t weft_lock;
extern __thread int weft_device;

/* One line of the record: printf of JSON fields behind {"n":..,"call":"..". */
void weft_record(const char *call, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The fields "op" or "line" of a call that is being recorded. how: 0, the op alone; 1, the line too
 * if this thread runs Python now; 2, take Python's lock for it, where no lock of torch is held. */
const char *weft_where(int how);
Stream *weft_stream(cudaStream_t stream);
/* Takes an operation into the stream (and its capture): the number of the graph, or 0; < 0: error. */
int weft_issue(Stream *stream);
Node *weft_node(Stream *stream);
int weft_unmodelled(const char *name, int code);
int weft_product(void *handle, const char *name);
cudaError_t weft_fail(const char *name, cudaError_t code);
/* Bring the data of collectives to the host memory that now will be read; 0 if a rank is missing. */
int weft_settle(const void *source, size_t bytes);
